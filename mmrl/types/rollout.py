"""Prompts, and rollouts with the tokens that they consist of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mmrl.types.media import CoordinateSystem, MediaRef, ResizeMap
from mmrl.types.sample import Sample


class Author(StrEnum):
    """Origin of a segment's tokens, which alone decides which loss they get."""

    POLICY = "policy"  # sampled by the model: the policy loss
    DEMONSTRATION = "demonstration"  # written by a teacher: the likelihood
    FORCED = "forced"  # put into the model's mouth, such as a trigger: never trained on
    ENVIRONMENT = "environment"  # a tool's reply: never trained on


TRAINED_AUTHORS = (Author.POLICY, Author.DEMONSTRATION)
"""The authors whose tokens are scored and trained. Everything that skips the others' tokens reads this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A rollout as reward functions see it, beside the sample.

    Example: `Response(text="... <answer>3</answer>", answer=..., finish_reason=FinishReason.EOS, num_tokens=41, ...)`
    """

    text: str
    """Everything after the prompt, replies of tools included."""
    answer: Answer
    """`text`, parsed."""
    finish_reason: FinishReason
    num_tokens: int
    """Tokens after the prompt, whoever wrote them."""
    resize_maps: tuple[ResizeMap, ...]
    """One for each image or video of the sample, in reading order; a video's frames share one."""
    coordinate_system: CoordinateSystem
    """Units of the coordinates in `answer`."""
    tool_resize_maps: tuple[ResizeMap, ...] = ()
    """Those of images that tools showed. No coordinates of `answer` refer to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A sample as the model reads it: tokens, and the layout of its images and videos.

    Example: `Prompt(sample=..., token_ids=(5, 9, 9, ...), grids=((1, 6, 6),), resize_maps=(...,), ..., digest="9f..")`
    """

    sample: Sample
    token_ids: tuple[int, ...]
    """Prompt tokens, with one placeholder for each visual token."""
    grids: tuple[tuple[int, int, int], ...]
    """Time, height and width in patches of each image or video, in reading order."""
    resize_maps: tuple[ResizeMap, ...]
    """Resizing of each image or video, in reading order."""
    coordinate_system: CoordinateSystem
    """Units in which the model writes coordinates."""
    digest: str
    """Hash of tokens, grids and pixels. It tells whether media are still what they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Distribution that tokens are sampled from, and conditions that end sampling.

    The learner evaluates log-probs under the same distribution. Sampling ends after EOS, after the token that completes
    a stop string, or after `max_new_tokens`.

    Example: `SamplingParams(temperature=0.8, max_new_tokens=512)`
    """

    temperature: float = 1.0
    """Divisor of the logits; 0 is greedy."""
    top_p: float = 1.0
    """Total probability of the tokens that may be sampled; 1 for all."""
    top_k: int = 0
    """Number of tokens that may be sampled; 0 for all."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens that are never sampled."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    max_new_tokens: int
    """Most tokens that are sampled."""

    @property
    def effective_temperature(self) -> float:
        """Divisor of the logits when log-probs are computed: the temperature, and 1 for greedy sampling."""
        return self.temperature or 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaObservation:
    """An image or video that a tool showed within a response.

    Example: `MediaObservation(ref=crop, grid=(1, 4, 4), resize_map=..., digest="7c..")`
    """

    ref: MediaRef
    grid: tuple[int, int, int]
    """Time, height and width in patches."""
    resize_map: ResizeMap
    digest: str
    """Hash of its tokens, grid and patches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens of a response by one author.

    Example: `Segment(token_ids=(41, 3), logprobs=(-0.2, -1.1), author=Author.POLICY, version=12)`
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-prob of each token under the distribution that it was sampled from, nats; 0 for authors other than POLICY."""
    author: Author
    version: int = 0
    """Policy version that sampled the tokens: optimizer steps since the run began."""
    sampling_params: SamplingParams | None = None
    """Distribution that these tokens were sampled from; None for the rollout's own."""
    observation: MediaObservation | None = None
    """The image or video that the tokens stand for; the segment has no other tokens then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Parts of a response, parsed once.

    Example: `Answer(text="3", thinking="one, two, three", value=3)`
    """

    text: str | None
    """Text where the answer belongs; None if there is no such place."""
    thinking: str | None
    """Text of the thinking; None if there is none."""
    value: Any
    """The answer as the Python value of its `AnswerType`; None if the text cannot be parsed as one."""
    problems: tuple[str, ...] = ()
    """Departures from the response format, one sentence each."""
    sections: Mapping[str, str] = field(default_factory=dict)
    """Text of the format's other sections, by tag."""


class FinishReason(StrEnum):
    """Event that ended a rollout."""

    EOS = "eos"  # the model's end token
    STOP = "stop"  # a stop string
    LENGTH = "length"  # `max_new_tokens`


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One response to a prompt.

    Example: `Rollout(prompt=..., index=0, segments=(...,), text="3", answer=..., finish_reason=FinishReason.EOS, ...)`
    """

    prompt: Prompt
    index: int
    """Number of the rollout within its group, from 0."""
    segments: tuple[Segment, ...]
    """Tokens after the prompt, in order."""
    text: str
    """`segments`, decoded without special tokens."""
    answer: Answer
    """`text`, parsed."""
    finish_reason: FinishReason
    sampling_params: SamplingParams
    """Distribution of all segments that name no other."""
    parent_index: int | None = None
    """Index of the first response that a forced rethink continued; None for a first response."""
    is_correct: bool | None = None
    """Verdict of the rethink step on how the continuation ended; None if it did not judge this end."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens after the prompt, whoever wrote them."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def observations(self) -> tuple[MediaObservation, ...]:
        """Images and videos that tools showed, in order."""
        return tuple(segment.observation for segment in self.segments if segment.observation is not None)

    @property
    def media(self) -> tuple[MediaRef, ...]:
        """Images and videos that the model saw: the sample's, then those that tools showed."""
        return (*self.prompt.sample.media, *(observation.ref for observation in self.observations))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """Result of the rollout steps for a batch of prompts.

    Example: `RolloutBatch(groups=((a, b), (c, d)), metrics={"rethink/frac": 0.5})`
    """

    groups: tuple[tuple[Rollout, ...], ...]
    """A group of rollouts for each prompt that is complete, in order."""
    unfinished: tuple[tuple[Rollout, ...], ...] = ()
    """Groups that the next step goes on with, since some of their rollouts have not ended."""
    probes: tuple[Mapping[str, tuple[Rollout, ...]], ...] = ()
    """For each of `groups`, rollouts that never train, by the name of the probe; empty without probes."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the rollout steps, by their full names."""
