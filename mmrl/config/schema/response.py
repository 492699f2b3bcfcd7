"""How responses are written, and how they are scored."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mmrl.config.schema.base import NonNegativeInt, SampleConditions, StrictModel, TagName, matches_conditions
from mmrl.types import Sample


class ResponseSectionConfig(StrictModel):
    """A part of a response before the answer, besides the thinking: an observation, say."""

    tag: TagName
    """Its name."""
    required: bool = True
    """Whether a response may leave it out."""
    after_thinking: bool = False
    """Whether it stands between thinking and answer, rather than before both."""


class ResponseFormatConfig(StrictModel):
    """How a response is written. One statement drives prompt text, parser, demonstrations and the format reward."""

    thinking: Literal["none", "optional", "required"] = "none"
    """Whether the response opens with <think>...</think>."""
    style: Literal["tags", "boxed", "json"] = "tags"
    """Where the answer stands: in <answer>...</answer>; in \\boxed{...}, with free words before it; or as the last
    field of one JSON object, whose other fields are the thinking and the sections."""
    answer_tag: TagName = "answer"
    """Name of the answer's tag, or of its JSON field."""
    think_tag: TagName = "think"
    """Name of the thinking's tag, or of its JSON field."""
    sections: tuple[ResponseSectionConfig, ...] = ()
    """Other parts that come before the answer, in their order."""
    stop_at_answer: bool = False
    """End a response at the closing tag of its answer. Otherwise it goes on until it ends itself, as demonstrations do,
    and learns to do so."""
    stop_strings: tuple[str, ...] = ()
    """Other strings that end a response."""
    add_instruction: bool = True
    """Append a sentence to the question that states the format."""

    @model_validator(mode="after")
    def _check_unique_tags(self) -> ResponseFormatConfig:
        names = [self.answer_tag, self.think_tag, *(section.tag for section in self.sections)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two parts of a response are named {twice[0]!r}")
        return self

    @model_validator(mode="after")
    def _check_stop_strings(self) -> ResponseFormatConfig:
        if self.stop_at_answer and self.style != "tags":
            raise ValueError(f"stop_at_answer needs `style: tags`: style {self.style!r} has no closing tag to stop at")
        if "" in self.stop_strings:
            raise ValueError("more_stops has an empty string, which would end every response before it begins")
        return self


class RewardTransformConfig(StrictModel):
    """What a value goes through before it counts, in this order; metrics and gates see the value itself."""

    clip: tuple[float, float] | None = None
    """Ends it is cut at."""
    threshold: float | None = None
    """1 if it reaches this, else 0."""
    power: Annotated[float, Field(gt=0.0)] = 1.0
    """Exponent; for values from 0 up."""
    rescale_to: tuple[float, float] | None = None
    """Ends that its range is stretched to: [-1, 1] makes the worst a penalty."""


class WeightScheduleConfig(StrictModel):
    """A factor on the weight over the steps of a stage. Evaluation has none, so that looks compare."""

    points: Annotated[tuple[tuple[NonNegativeInt, Annotated[float, Field(ge=0.0)]], ...], Field(min_length=1)]
    """Pairs of step (from 0) and factor; before the first and after the last it stays."""
    interpolation: Literal["linear", "steps"] = "linear"
    """Between two points: a straight line, or the earlier one's factor."""

    @model_validator(mode="after")
    def _check_points(self) -> WeightScheduleConfig:
        steps = [step for step, _ in self.points]
        if any(later <= earlier for earlier, later in pairwise(steps)):
            raise ValueError(f"steps must rise from point to point, got {', '.join(map(str, steps))}")
        return self

    def factor_at(self, step: int) -> float:
        """The factor at a step."""
        after = bisect_right([at for at, _ in self.points], step)
        if after in (0, len(self.points)):
            return self.points[max(after - 1, 0)][1]
        (start, low), (end, high) = self.points[after - 1 : after + 1]
        return low if self.interpolation == "steps" else low + (high - low) * (step - start) / (end - start)


class BaseRewardConfig(StrictModel):
    """What a function pays, to which samples, and how much it counts."""

    fn: str
    """`module:function` or `./file.py:function`."""
    name: str | None = None
    """Name in metrics; the function's own name when left out."""
    weight: float = 1.0
    """Factor in the total; exponent where totals are products."""
    schedule: WeightScheduleConfig | None = None
    """How the weight changes over the steps of a stage."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of the function."""
    when: SampleConditions = Field(default_factory=dict)
    """Samples the term applies to, all when empty: allowed values of `task` or of a column of the sample's `meta`."""

    def applies_to(self, sample: Sample) -> bool:
        """Whether the sample meets every condition of `when`."""
        return matches_conditions(self.when, sample)

    def weight_at(self, step: int | None) -> float:
        """The weight at a step of the stage, or the one without a schedule."""
        return self.weight if step is None or self.schedule is None else self.weight * self.schedule.factor_at(step)


class RewardTermConfig(BaseRewardConfig):
    """One reward term."""

    training_only: bool = False
    """Leave the term out of evaluation totals (a shaping bonus, say)."""
    requires: str | None = None
    """Name of another term; unless that one's value exceeds `gate_above`, and its own gate is open, this one counts
    0."""
    requires_above: float = 0.0
    """What the value of the gate must exceed."""
    transform: RewardTransformConfig = RewardTransformConfig()
    """From the reward's value to what counts."""
    fallback: float | None = None
    """Value that stands in for a failed call where the policy is `fallback`, and in evaluation; the low end of the
    reward's range when left out."""
    timeout_s: Annotated[float, Field(gt=0.0)] | None = None
    """Seconds a call may take; the term then runs in worker processes even where `rewards.workers` is 0."""


RewardFailurePolicy = Literal["stop", "skip", "skip_group", "fallback"]


class ScoringConfig(StrictModel):
    """What holds for all terms."""

    combine: Literal["sum", "product", "min", "lexicographic"] = "sum"
    """From terms to the total: sum of weight x value; product of value^weight; the worst value; or the first term,
    and where two responses are within 1/100 of its range, the second, and so on."""
    workers: NonNegativeInt = 0
    """Processes that call rewards. With 0, this process does, and a call that hangs would hang the run: rewards that
    declare a deadline, as they may hang, have a process of their own even so."""
    timeout_s: Annotated[float, Field(gt=0.0)] = 10.0
    """Seconds a call in a worker may take, unless the term or the reward says otherwise; then the worker is killed."""
    on_unscorable: RewardFailurePolicy = "skip"
    """When a reward cannot judge a response, is killed at its deadline or dies: end the run, leave the rollout or its
    whole group out of the step, or take the term's `fallback`. Counted in `reward/<term>/...`. Before the first step
    and in evaluation nothing is left out."""
    on_error: RewardFailurePolicy = "stop"
    """The same, when a reward raises anything else or returns no number in its range: a bug."""


class GroupRewardConfig(BaseRewardConfig):
    """What a response earns by comparison with its siblings, in training only: see `mmrl.algo.group_rewards`.

    Its option `correct` names the reward terms that say whether a response is right.
    """


class RewardsConfig(ScoringConfig):
    """How a response is scored."""

    terms: Annotated[tuple[RewardTermConfig, ...], Field(min_length=1)]
    """The terms."""
    group_rewards: tuple[GroupRewardConfig, ...] = ()
    """Added to the totals of a group before they become advantages."""

    @model_validator(mode="after")
    def _check_weights(self) -> RewardsConfig:
        weighted = [term.fn for term in self.terms if term.weight != 1.0 or term.schedule is not None]
        if self.combine in ("min", "lexicographic") and weighted:
            raise ValueError(f"combine {self.combine} takes no weights, and {weighted[0]} has one; use `transform`")
        if self.combine == "product" and any(term.weight < 0 for term in self.terms):
            raise ValueError("combine product takes weights as exponents: they must be 0 or more")
        return self
