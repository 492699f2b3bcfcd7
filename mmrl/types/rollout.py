"""Prompts, responses and the tokens they consist of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mmrl.types.media import CoordinateSystem, MediaRef, ResizeMap
from mmrl.types.sample import Sample


class Author(StrEnum):
    """Who produced a segment's tokens; what may be trained follows from it and from nothing else."""

    POLICY = "policy"  # sampled by the model: the policy term
    DEMONSTRATION = "demonstration"  # a demonstration: the likelihood term
    FORCED = "forced"  # text forced upon the model: never trained
    ENVIRONMENT = "environment"  # a tool's or environment's text: never trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What a reward sees of a rollout; it sees the whole sample too. Coordinates in `answer` are in `frame`.

    `resizes` has one map per medium of the sample, in reading order; a video's frames share one. `shown` has those of
    what tools showed; no coordinates of `answer` are measured there.
    """

    text: str
    answer: Answer
    finish_reason: FinishReason
    num_tokens: int
    resize_maps: tuple[ResizeMap, ...]
    coordinate_system: CoordinateSystem
    tool_resize_maps: tuple[ResizeMap, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A sample as the model will read it: `ids` with every placeholder expanded, `digest` a hash of ids, grids, pixels.

    `grids` (t, h, w, in patches) and `resizes` have one entry per medium, in reading order.
    """

    sample: Sample
    token_ids: tuple[int, ...]
    grids: tuple[tuple[int, int, int], ...]
    resize_maps: tuple[ResizeMap, ...]
    coordinate_system: CoordinateSystem
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The distribution tokens are drawn from, which the learner evaluates too, and where drawing ends: after EOS, after
    the token that completes one of the strings of `stop`, or after so many tokens. Temperature 0 means greedy.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    banned_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    max_new_tokens: int

    @property
    def effective_temperature(self) -> float:
        """What logits are divided by: the temperature; 1 for the greedy law, which is evaluated as if it were drawn."""
        return self.temperature or 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaObservation:
    """A picture or video that a tool shows in a response; `digest` is a hash of its tokens, grid and patches."""

    ref: MediaRef
    grid: tuple[int, int, int]
    resize_map: ResizeMap
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens by one author. `logps` are behaviour log-probs in nats, one per token, under the law they were
    drawn from: `law`, or that of the rollout where it is None. Of a `view` they are the tokens, all of them, alone.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    author: Author
    version: int = 0
    sampling_params: SamplingParams | None = None
    observation: MediaObservation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response, parsed once. `value` is None when nothing of the right kind stands where the answer belongs.

    `sections` holds the text of the grammar's other parts, by their tags: an observation before the thinking, say.
    """

    text: str | None
    thinking: str | None
    value: Any
    problems: tuple[str, ...] = ()
    sections: Mapping[str, str] = field(default_factory=dict)


class FinishReason(StrEnum):
    """Why a rollout ended."""

    EOS = "eos"
    STOP = "stop"  # a string that ends responses
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One response to a prompt; `index` is its place among its siblings, `parent` that of the draft it went on from.

    `right` is what a step that made it go on found the end to be; None where none has, or where it went on since.
    """

    prompt: Prompt
    index: int
    segments: tuple[Segment, ...]
    text: str
    answer: Answer
    finish_reason: FinishReason
    sampling_params: SamplingParams
    parent_index: int | None = None
    is_correct: bool | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens after the prompt, whoever wrote them."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def observations(self) -> tuple[MediaObservation, ...]:
        """What tools showed, in order."""
        return tuple(segment.observation for segment in self.segments if segment.observation is not None)

    @property
    def media(self) -> tuple[MediaRef, ...]:
        """The pictures and videos that it saw: the sample's, then what tools showed."""
        return (*self.prompt.sample.media, *(view.ref for view in self.observations))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """What a rollout program made of prompts, in their order: a group of rollouts for each; rollouts that never train,
    by what was done to their prompt (a picture left out, say); and numbers to tell. Groups that are not complete wait
    in `pending` for the next step.
    """

    groups: tuple[tuple[Rollout, ...], ...]
    unfinished: tuple[tuple[Rollout, ...], ...] = ()
    probes: tuple[Mapping[str, tuple[Rollout, ...]], ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
