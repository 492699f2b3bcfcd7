"""Section `rewards`: how a response is scored."""

from __future__ import annotations

from bisect import bisect_right
from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from mmrl.config.schema.base import (
    NO_EFFECT,
    ROLLOUT_PREFIX,
    FunctionConfig,
    Identifier,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    SampleConditions,
    Seconds,
    StrictModel,
    Weight,
    WorkerLimitsConfig,
    Workers,
    check_rising_steps,
    parse_rollout_conditions,
)


class RewardTransformConfig(StrictModel):
    """Changes to a reward's value before it enters the total, in the order of these keys.

    Metrics and `requires` use the unchanged value.
    """

    clip: tuple[Number, Number] | None = None
    """Values outside these two are set to the nearer one."""
    threshold: Number | None = None
    """The value becomes 1 if it reaches this, else 0."""
    rescale_to: tuple[Number, Number] | None = None
    """Interval that the reward's range is stretched to: [-1, 1] makes the worst value a penalty."""


class WeightScheduleConfig(StrictModel):
    """A factor on the weight that changes over a stage. Evaluation ignores it, so that its results stay comparable."""

    points: Annotated[tuple[tuple[NonNegativeInt, NonNegativeFloat], ...], Field(min_length=1)]
    """Pairs of a step (from 0) and a factor. Before the first of these steps and after the last, the factor is
    constant."""
    interpolation: Literal["linear", "steps"] = "linear"
    """`linear` changes the factor evenly between two points; `steps` keeps the factor of the earlier point."""

    @model_validator(mode="after")
    def _check_points(self) -> WeightScheduleConfig:
        check_rising_steps([step for step, _ in self.points])
        return self

    def factor_at(self, step: int) -> float:
        """Return the factor at a step."""
        # `bisect_right`, so that the factor of a point already applies at its own step.
        after = bisect_right([point_step for point_step, _ in self.points], step)
        if after in (0, len(self.points)):
            return self.points[max(after - 1, 0)][1]
        (start, low), (end, high) = self.points[after - 1 : after + 1]
        return low if self.interpolation == "steps" else low + (high - low) * (step - start) / (end - start)


RewardConditions = Annotated[
    SampleConditions,
    BeforeValidator(
        parse_rollout_conditions,
        json_schema_input_type=dict[str, bool | int | str | tuple[bool | int | str, ...]],
    ),
]
"""Conditions on the sample; those whose names begin with `rollout.` are on the rollout."""


Fallback = Annotated[
    Annotated[Number | None, Tag("value")] | Annotated[Identifier, Tag("term")],
    Discriminator(lambda value: "term" if isinstance(value, str) else "value"),
]


class BaseRewardConfig(FunctionConfig):
    """A function that scores responses, the samples it applies to, and its weight."""

    name: str | None = None
    """Name in metrics; when left out, the name that the reward declares, or the name of the group reward's function."""
    weight: Weight = 1.0
    """Factor on the value in the total; with `combine: product`, exponent of a reward term's value. A group reward is
    always added, times this factor."""
    schedule: WeightScheduleConfig | None = None
    """Factors on the weight that change over the steps of a stage."""
    when: SampleConditions = Field(default_factory=dict)
    """Samples that it applies to: allowed values of `task` or of a column of `meta`. All samples when empty."""

    def weight_at(self, step: int | None) -> float:
        """Return the weight at a step of the stage; without a step, the weight without its schedule."""
        # Evaluation passes no step, so that its results can be compared from step to step.
        return self.weight if step is None or self.schedule is None else self.weight * self.schedule.factor_at(step)


class RewardTermConfig(BaseRewardConfig):
    """A reward term."""

    when: RewardConditions = Field(default_factory=dict)
    """Samples that it applies to: allowed values of `task` or of a column of `meta`. Keys that begin with `rollout.`
    select among their rollouts: `rollout.rethought` and `rollout.used_tool` (true or false), `rollout.turns`
    (numbers), `rollout.finish_reason` (eos, stop or length). On all other rollouts the term is not called and counts
    0."""
    training_only: bool = False
    """Leave the term out of evaluation totals (a shaping bonus, for example)."""
    requires: str | None = None
    """Name of another term. This term counts only if that term's value exceeds `requires_above` and that term's own
    `requires` is met; otherwise it counts 0."""
    requires_above: Number = 0.0
    """Value that the required term must exceed."""
    transform: RewardTransformConfig = RewardTransformConfig()
    """Changes to the value before it enters the total."""
    fallback: Fallback = None
    """Name of a term that scores a response if this term abstains or fails; the named term then counts only as a
    fallback. Or the value that replaces a failed call in evaluation, and in training under the failure policy
    `fallback`. When left out, the lower end of the reward's range."""
    fallback_on: Literal["abstention", "bad_answer", "low"] = "abstention"
    """Cases in which the term that `fallback` names scores the response. `abstention`: this term abstains or fails.
    `bad_answer`: also if it cannot read the answer. `low`: also if it gives the low end of its range."""
    timeout_s: Seconds | None = None
    """Seconds a call may take. With it, the term runs in worker processes even where `rewards.workers` is 0."""

    @model_validator(mode="after")
    def _check_requires(self) -> RewardTermConfig:
        if self.requires is None and self.requires_above:
            raise ValueError("requires_above is the value that a required term must exceed; name it in `requires`")
        return self

    @property
    def sample_when(self) -> SampleConditions:
        """The conditions of `when` that are about samples."""
        return {key: allowed for key, allowed in self.when.items() if not key.startswith(ROLLOUT_PREFIX)}


RewardFailurePolicy = Literal["stop", "skip", "skip_group", "fallback"]


class ScoringConfig(StrictModel):
    """Options that all reward terms share."""

    combine: Literal["sum", "product", "min"] = "sum"
    """Computation of the total. `sum`: of weight x value. `product`: of value^weight. `min`: the smallest value."""
    workers: Annotated[Workers, NO_EFFECT] = 0
    """Processes that call rewards. 0 calls the rewards that come with mmrl in the main process; rewards that declare a
    deadline, and users' rewards, run in a worker process even then."""
    custom_rewards: Annotated[Literal["worker", "main_process"], NO_EFFECT] = "worker"
    """Process that runs users' rewards and group rewards. `worker`: a process with a deadline and limits.
    `main_process`: the main process if `workers` is 0; nothing stops a reward that hangs there."""
    timeout_s: Seconds = 10.0
    """Seconds a call in a worker may take, unless the term or the reward sets its own, before the worker is killed."""
    worker_limits: WorkerLimitsConfig = WorkerLimitsConfig()
    """Limits of the workers that call rewards."""
    on_missing_score: RewardFailurePolicy = "skip"
    """For a reward that abstains, exceeds its deadline or a limit, or kills its process: `stop` ends the run, `skip`
    leaves the rollout out of the step, `skip_group` leaves its whole group out, `fallback` uses the term's
    `fallback`. Counted in `reward/<term>/...`. Before the first step and in evaluation nothing is left out."""
    on_error: RewardFailurePolicy = "stop"
    """As `on_missing_score`, for a bug: a reward that raises another exception, or returns no number in its range."""


class GroupRewardConfig(BaseRewardConfig):
    """A reward that compares each response with its group, in training only; see `mmrl.algo.group_rewards`.

    Its option `correct` names the reward terms that decide whether a response is correct.
    """

    @field_validator("when")
    @classmethod
    def _check_when(cls, when: SampleConditions) -> SampleConditions:
        for key in when:
            if key.startswith(ROLLOUT_PREFIX):
                raise ValueError(f"{key} is about one rollout, and a group reward is about all of a prompt")
        return when


class RewardsConfig(ScoringConfig):
    """Scores of a response."""

    terms: Annotated[tuple[RewardTermConfig, ...], Field(min_length=1)]
    """Functions that score each response."""
    group_rewards: tuple[GroupRewardConfig, ...] = ()
    """Rewards that are added to the totals of a group before they become advantages."""

    @model_validator(mode="after")
    def _check_weights(self) -> RewardsConfig:
        if self.combine == "min":
            for term in self.terms:
                if term.weight != 1.0 or term.schedule is not None:
                    raise ValueError(f"combine min takes no weights, and {term.fn} has one; use `transform`")
        if self.combine == "product" and any(term.weight < 0 for term in self.terms):
            raise ValueError("combine product takes weights as exponents: they must be 0 or more")
        for term in self.terms:
            if term.fallback_on != "abstention" and not isinstance(term.fallback, str):
                raise ValueError(f"{term.fn}: fallback_on {term.fallback_on} needs a `fallback` that names a term")
        return self
