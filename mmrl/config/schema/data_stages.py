"""Stages that make data rather than weights: rollouts written down, and what is chosen of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from mmrl import types
from mmrl.config.schema.base import Identifier, PositiveInt, SampleConditions, StrictModel, matches_conditions
from mmrl.config.schema.rollout_steps import (
    GENERATE_ONLY,
    RolloutStepConfigs,
    ToolsConfig,
    check_free_tokens,
    check_plain_generation,
    check_rollout_steps,
)
from mmrl.config.schema.stages import SamplingConfig

NonNegativeFloat = Annotated[float, Field(ge=0.0)]


class SampleStage(StrictModel):
    """Rollouts of the policy as it is, written with their reward terms to RUN/outputs/NAME.jsonl."""

    name: Identifier
    """Name in file names and on the console; unique in the run."""
    kind: Literal["sample"]
    """Selects this kind of stage."""
    from_stage: Identifier | None = None
    """An earlier `select` stage whose samples are asked; those of `data.train` when left out."""
    when: SampleConditions = Field(default_factory=dict)
    """Those of them that are taken, all when empty: allowed values of `task` or of a column of the sample's `meta`."""
    group_size: PositiveInt = 8
    """Rollouts per prompt."""
    prompts_per_step: PositiveInt = 16
    """Prompts that are answered at a time, and written before the next ones."""
    steps: PositiveInt | None = None
    """Steps at most; every sample is asked once when left out."""
    sampling: SamplingConfig = SamplingConfig()
    """How rollouts are drawn."""
    rollout_steps: Annotated[RolloutStepConfigs, AfterValidator(check_rollout_steps)] = GENERATE_ONLY
    """What is done with a prompt: generate, and perhaps second looks that take their drafts' place."""

    @field_validator("rollout_steps")
    @classmethod
    def _check_plain_responses(cls, program: RolloutStepConfigs) -> RolloutStepConfigs:
        """What is written is a text for each rollout, without who wrote which part of it."""
        check_plain_generation(program, "a sample stage", "writes `group_size` rollouts")
        for step in program:
            if isinstance(step, ToolsConfig):
                raise ValueError(
                    f"step {step.name!r} would write what tools say as if the policy had: a sample stage has no tools"
                )
        return program

    @model_validator(mode="after")
    def _check_free_tokens(self) -> SampleStage:
        check_free_tokens(self.rollout_steps, self.sampling.max_new_tokens)
        return self

    def accepts(self, sample: types.Sample) -> bool:
        """Whether the stage asks a sample of its source."""
        return matches_conditions(self.when, sample)

    @model_validator(mode="after")
    def _check_sampling_not_greedy(self) -> SampleStage:
        if self.sampling.temperature == 0.0 and self.group_size > 1:
            raise ValueError(
                f"temperature 0 makes all {self.group_size} rollouts of a prompt equal; use a value above 0, or "
                "group_size 1"
            )
        return self


class SelectStage(StrictModel):
    """What later stages train on: chosen of what an earlier stage found out, and written to RUN/outputs/NAME.jsonl."""

    name: Identifier
    """Name in file names and on the console; unique in the run, and what a later stage's `source` says."""
    kind: Literal["select"]
    """Selects this kind of stage."""
    from_stage: Identifier
    """The earlier stage that found out: a `sample` stage, or an `rl` stage with `history`."""
    metric: Literal["pass_rate", "first_correct", "reward_mean", "reward_std", "limr"] = "pass_rate"
    """What a sample is judged by. Of a `sample` stage: the share of its rollouts that is right, or which of them was
    the first (one more than there are if none is). Of an `rl` stage, over the times it was drawn there: mean or
    standard deviation of its reward, or how closely that followed the mean of all samples (LIMR)."""
    range: tuple[NonNegativeFloat, NonNegativeFloat | None] = (0.0, None)
    """Least and greatest value that is kept; null is no bound."""
    top_k: PositiveInt | None = None
    """Then only so many, those of the greatest values."""
    output: Literal["prompts", "responses"] = "prompts"
    """The samples, to be asked anew; or their right responses, for an `sft` stage with `imitate: response`."""
    max_responses: PositiveInt | None = None
    """Right responses of a sample that are kept at most, the shortest first."""
    correct: tuple[str, ...] = ()
    """Reward terms that say whether a response of a `sample` stage is right: all of them that apply to it do."""
    threshold: float = 1.0
    """What a term must reach to say so."""

    @property
    def reads_rollouts(self) -> bool:
        """Whether it goes by rollouts, rather than by the history of training."""
        return self.metric in ("pass_rate", "first_correct")

    @model_validator(mode="after")
    def _check_options(self) -> SelectStage:
        low, high = self.range
        if high is not None and high < low:
            raise ValueError(f"within [{low:g}, {high:g}] holds nothing; write the lower end first")
        if self.reads_rollouts and not self.correct:
            raise ValueError(f"by {self.metric!r} needs `right`: the reward terms that say whether a response is right")
        if not self.reads_rollouts and (self.output == "responses" or self.correct):
            raise ValueError(f"by {self.metric!r} goes by history, which has no responses: take out `keep` and `right`")
        if self.max_responses is not None and self.output != "responses":
            raise ValueError("`most` counts right responses; set `keep: responses`")
        return self
