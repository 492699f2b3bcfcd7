"""Prompts, rollouts with the tokens that they consist of, and their rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from mmrl.types.environment import Turn
from mmrl.types.sample import CoordinateSystem, MediaRef, ResizeMap, Sample


class Author(StrEnum):
    """Origin of a segment's tokens, which decides whether they are trained."""

    POLICY = "policy"  # sampled by the model: the policy loss
    DEMONSTRATION = "demonstration"  # written by a teacher: the likelihood
    # The part of a demonstration before its answer, with `loss_on: answer`: never trained on.
    DEMONSTRATION_PREFIX = "demonstration_prefix"
    FORCED = "forced"  # a trigger that makes a response rethink: never trained on
    ENVIRONMENT = "environment"  # a tool's reply, or what an environment shows: never trained on


TRAINED_AUTHORS = (Author.POLICY, Author.DEMONSTRATION)
"""Authors whose tokens get log-probs, in `policy.batch._logprob_tokens`, and a loss, in `learner.tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A rollout as reward functions see it, beside the sample."""

    text: str  # everything after the prompt, replies of tools included
    answer: Answer  # `text`, parsed
    finish_reason: FinishReason  # event that ended it
    num_tokens: int  # tokens after the prompt, by any author
    resize_maps: tuple[ResizeMap, ...]  # one for each image or video of the sample; a video's frames share one
    coordinate_system: CoordinateSystem  # units of the coordinates in `answer`
    tool_resize_maps: tuple[ResizeMap, ...] = ()  # of images that tools showed; `answer` never refers to them
    num_turns: int = 1  # times that the model wrote: a reply of a tool or an environment ends a turn
    used_tool: bool = False  # a tool replied, even if only to refuse
    rethought: bool = False  # a forced rethink continued a first response
    turns: tuple[Turn, ...] = ()  # the turns in an environment, with action and reply; empty without one


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A sample as the model reads it: tokens, and the layout of its images and videos."""

    sample: Sample  # the sample it was built from
    token_ids: tuple[int, ...]  # prompt tokens, with one placeholder for each visual token
    grids: tuple[tuple[int, int, int], ...]  # time, height, width in patches of each image or video, in order
    resize_maps: tuple[ResizeMap, ...]  # resizing of each image or video, in reading order
    coordinate_system: CoordinateSystem  # units in which the model writes coordinates
    digest: str  # hash of tokens, positions, grids and pixels, in hex; it shows whether media have changed

    @property
    def group_key(self) -> tuple[str, str]:
        """Key of the group of its rollouts: copies of a sample have one digest, but groups of their own."""
        return self.sample.id, self.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Distribution that tokens are sampled from, and conditions that end sampling.

    Log-probs, both recorded and computed by the learner, are at this temperature and without the banned tokens, but
    as if `top_p` and `top_k` were not set (docs/decisions/0004-top-p-is-not-renormalised.md). Sampling ends after EOS,
    after the token that completes a stop string, or after `max_new_tokens`.
    """

    temperature: float = 1.0  # divisor of the logits, at least 0; 0 is greedy
    top_p: float = 1.0  # total probability of the tokens that may be sampled, in (0, 1]; 1 for all
    top_k: int = 0  # number of tokens that may be sampled; 0 for all
    banned_token_ids: tuple[int, ...] = ()  # tokens that are never sampled
    stop: tuple[str, ...] = ()  # strings that end a response
    max_new_tokens: int  # most tokens that are sampled

    @property
    def effective_temperature(self) -> float:
        """Divisor of the logits when log-probs are computed: the temperature, and 1 for greedy sampling."""
        return self.temperature or 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaObservation:
    """An image or video that a tool showed within a response."""

    ref: MediaRef  # the image or video
    grid: tuple[int, int, int]  # time, height and width in patches
    resize_map: ResizeMap  # its resizing; a video's frames share one
    digest: str  # hash of its tokens, grid and patches, in hex


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRoutes:
    """Experts that a rollout engine sent consecutive tokens to, in each layer that has experts."""

    expert_ids: bytes  # numbers of experts, [tokens, layers, experts of a token], unsigned and little-endian
    num_layers: int  # layers that have experts
    experts_per_token: int  # experts that a token goes to in each of them
    bytes_per_id: int  # 1, or 2 where a layer has more than 256 experts

    @property
    def bytes_per_token(self) -> int:
        """Number of bytes in `expert_ids` for each token."""
        return self.num_layers * self.experts_per_token * self.bytes_per_id

    @property
    def num_tokens(self) -> int:
        """Number of leading tokens whose routes are recorded."""
        return len(self.expert_ids) // self.bytes_per_token

    def cut(self, start: int, stop: int) -> ExpertRoutes:
        """Return the routes of the tokens from `start` to before `stop`, or of fewer if there are fewer."""
        size = self.bytes_per_token
        return replace(self, expert_ids=self.expert_ids[start * size : stop * size])

    def extended_by(self, routes: ExpertRoutes) -> ExpertRoutes:
        """Return these routes followed by the routes of further tokens."""
        return replace(self, expert_ids=self.expert_ids + routes.expert_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens of a response by one author."""

    token_ids: tuple[int, ...]  # the tokens
    logprobs: tuple[float, ...]  # of each token, as it was sampled, nats, at most 0; 0 for authors other than POLICY
    author: Author  # who wrote the tokens
    version: int = 0  # policy version that sampled the tokens: training steps since the run began
    sampling_params: SamplingParams | None = None  # distribution of these tokens; None for the rollout's own
    observation: MediaObservation | None = None  # image or video that all tokens of the segment are placeholders of
    routes: ExpertRoutes | None = None  # of the first tokens, which the engine has read; None if not recorded

    def cut(self, num_tokens: int) -> Segment:
        """Return the segment cut to its first tokens."""
        routes = None if self.routes is None else self.routes.cut(0, num_tokens)
        return replace(self, token_ids=self.token_ids[:num_tokens], logprobs=self.logprobs[:num_tokens], routes=routes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Parts of a response, parsed once."""

    text: str | None  # text where the answer belongs; None if there is no such place
    thinking: str | None  # text of the thinking; None if there is none
    value: Any  # the answer as the Python value of its `AnswerType`; None if the text cannot be parsed as one
    problems: tuple[str, ...] = ()  # departures from the response format, one sentence each
    sections: Mapping[str, str] = field(default_factory=dict)  # text of the format's other sections, by tag
    repeated: tuple[str, ...] = ()  # parts that occur more than once: tags of sections, or "thought"


class FinishReason(StrEnum):
    """Event that ended a rollout."""

    EOS = "eos"  # the model's end token
    STOP = "stop"  # a stop string
    LENGTH = "length"  # `max_new_tokens`


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One response to a prompt."""

    prompt: Prompt  # the prompt it responds to
    index: int  # number of the rollout within its group, from 0
    segments: tuple[Segment, ...]  # tokens after the prompt, in order
    text: str  # `segments`, decoded without special tokens
    answer: Answer  # `text`, parsed
    finish_reason: FinishReason  # event that ended it
    sampling_params: SamplingParams  # distribution of all segments that name no other
    parent_index: int | None = None  # index of the first response that a forced rethink continued; None for a first one
    is_correct: bool | None = None  # the rethink step's verdict on a continued response; None for others
    first_is_correct: bool | None = None  # its verdict on the first response; None for a first response
    prompt_routes: ExpertRoutes | None = None  # experts that the prompt's tokens went to; None if not recorded
    turns: tuple[Turn, ...] = ()  # actions taken in an environment, in order; empty without one
    failure: Failure | None = None  # set by the rollout step that failed; such a rollout is never scored

    @property
    def num_tokens(self) -> int:
        """Number of tokens after the prompt, by any author."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def oldest_version(self) -> int:
        """Policy version that sampled the oldest of its tokens; partial rollouts have tokens of several versions.

        The age of a rollout is counted from this version everywhere. A demonstration has none.
        """
        return min(segment.version for segment in self.segments if segment.author is Author.POLICY)

    @property
    def observations(self) -> tuple[MediaObservation, ...]:
        """Images and videos that tools showed, in order."""
        return tuple(segment.observation for segment in self.segments if segment.observation is not None)

    @property
    def media(self) -> tuple[MediaRef, ...]:
        """Images and videos that the model saw: the sample's, then the ones that tools showed."""
        return (*self.prompt.sample.media, *(observation.ref for observation in self.observations))

    @property
    def media_digests(self) -> tuple[str, ...]:
        """Digests of the prompt and of what tools showed. Rollouts with the same ones saw the same pixels."""
        return (self.prompt.digest, *(observation.digest for observation in self.observations))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """Result of the rollout steps for a batch of prompts."""

    groups: tuple[tuple[Rollout, ...], ...]  # complete groups of rollouts, one for each prompt, in order
    unfinished: tuple[tuple[Rollout, ...], ...] = ()  # groups to continue in the next round
    # For each of `groups`, rollouts that never train, by the name of the probe; empty without probes.
    probes: tuple[Mapping[str, tuple[Rollout, ...]], ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)  # metrics of the rollout steps, by their full names


class RewardValue(NamedTuple):
    """Result of one reward function for one response."""

    value: float  # within the range that the reward declares
    reason: str  # one line for a person who reads the rollout


class FailureKind(StrEnum):
    """Kind of failure of a reward or environment. It ends the metrics `reward/<term>/<kind>` and `<step>/<kind>`."""

    UNSCORABLE = "unscorable"  # it raised Unscorable
    TIMEOUT = "timeouts"  # it was stopped at its deadline
    LIMIT = "limits"  # its process exceeded a limit of memory or processes
    CRASH = "crashes"  # its process died
    ERROR = "errors"  # it raised something else, or returned no number in its range


class Failure(NamedTuple):
    """Why a response has no value of a reward, or none at all because a rollout step failed."""

    kind: FailureKind  # decides the metric that counts it
    reason: str  # one line for a person who reads the rollout
    step: str = ""  # name of the rollout step that failed; empty if a reward failed
    # True if a reward left the value to its fallback: where none applies, the low end of its range counts.
    counts_low_end: bool = False


class Contribution(NamedTuple):
    """The part that a reward term's value has in the total."""

    transformed: float  # the value after its transform
    weight: float  # the weight at the step, after its schedule
    is_counted: bool  # False if it counts 0: the term that it requires was too low, or its `when` excludes the rollout
    share: float | None  # addend of the total under `combine: sum`, factor under `product`; else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Rewards of one rollout, by term and in total."""

    terms: Mapping[str, RewardValue]  # result of each reward term, by name, before weights and transforms
    total: float  # of the terms, by their weights and `rewards.combine`; what advantages compare, unless per term
    failures: Mapping[str, Failure] = field(default_factory=dict)  # terms that gave no value; a fallback counts
    contributions: Mapping[str, Contribution] = field(default_factory=dict)  # of each of `terms`, for display
    decided_by: Mapping[str, str] = field(default_factory=dict)  # term without a value → fallback that gave one
    by_turn: tuple[float, ...] = ()  # addends of `total`, one for each turn in an environment; empty without turns

    @property
    def values_by_term(self) -> dict[str, float]:
        """Value of each reward term, by name, without its reason."""
        return {name: term.value for name, term in self.terms.items()}


class Dropped(NamedTuple):
    """A rollout that was left out of its group because it could not be scored."""

    rollout: Rollout  # the rollout, as it was generated
    failures: Mapping[str, Failure]  # terms at fault, by name; empty if a sibling's failure dropped the group


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A prompt with its scored rollouts."""

    prompt: Prompt  # the prompt that all of them respond to
    rollouts: tuple[Rollout, ...]  # rollouts that were scored; empty if none could be
    scores: tuple[Score, ...]  # one for each of `rollouts`, in the same order
    dropped: tuple[Dropped, ...] = ()  # rollouts that could not be scored
    # Scores of rollouts that never train, by name of the probe: for example, of the question with its image hidden.
    probes: Mapping[str, tuple[Score, ...]] = field(default_factory=dict)

    @property
    def all_rollouts(self) -> tuple[Rollout, ...]:
        """Every rollout of the prompt, scored ones first."""
        return (*self.rollouts, *(dropped.rollout for dropped in self.dropped))

    @property
    def totals(self) -> tuple[float, ...]:
        """Total reward of each rollout, in the order of `rollouts`."""
        return tuple(score.total for score in self.scores)


class EvalRewards(NamedTuple):
    """Rewards of an evaluation on held-out samples."""

    rewards: Mapping[str, Mapping[str, float]]  # task → sample id → total reward
    rollout_metrics: Mapping[str, float]  # metrics of the rollout steps, by their full names
    groups: tuple[Group, ...] = ()  # groups of some samples, evenly spaced, to be recorded
    failures: Mapping[tuple[str, str], int] = {}  # failed reward calls, by reward term and kind of error
