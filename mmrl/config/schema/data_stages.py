"""Stages that produce data: `sample` writes rollouts to a file, `select` chooses samples for later stages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from mmrl.config.schema.base import (
    BatchSize,
    Identifier,
    NonNegativeFloat,
    Number,
    PositiveInt,
    SampleConditions,
    StrictModel,
)
from mmrl.config.schema.rollout_steps import (
    GENERATE_ONLY,
    EnvironmentConfig,
    RolloutStepConfigs,
    ToolsConfig,
    check_free_tokens,
    check_plain_generation,
    check_rollout_steps,
)
from mmrl.config.schema.stages import SamplingConfig


class SampleStage(StrictModel):
    """Rollouts of the current policy, written with their reward terms to RUN/outputs/NAME.jsonl."""

    name: Identifier
    """The stage's name in file names and on the console; it is unique in the run."""
    kind: Literal["sample"]
    """Selects this kind of stage."""
    samples_of: Identifier | None = None
    """An earlier `select` stage whose samples are used; when left out, the samples of `data.train`."""
    when: SampleConditions = Field(default_factory=dict)
    """Samples that are used: allowed values of `task` or of a column of `meta`. All samples when empty."""
    group_size: BatchSize = 8
    """Rollouts generated for each prompt."""
    prompts_per_step: BatchSize = 16
    """Prompts whose rollouts are generated and written together."""
    steps: PositiveInt | None = None
    """The stage ends after this many steps at most; when left out, it uses every sample once."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling parameters of the rollouts."""
    rollout_steps: Annotated[RolloutStepConfigs, AfterValidator(check_rollout_steps)] = GENERATE_ONLY
    """Steps from a prompt to its rollouts: generate, and perhaps rethink."""

    @field_validator("rollout_steps")
    @classmethod
    def _check_plain_responses(cls, steps: RolloutStepConfigs) -> RolloutStepConfigs:
        check_plain_generation(steps, "a sample stage")
        for step in steps:
            # A written rollout is one text, which does not record which tokens the policy sampled.
            if isinstance(step, ToolsConfig | EnvironmentConfig):
                raise ValueError(
                    f"step {step.name!r} would write what it shows as if the policy had written it: a sample stage has "
                    f"no {step.kind}"
                )
        return steps

    @model_validator(mode="after")
    def _check_sampling(self) -> SampleStage:
        check_free_tokens(self.rollout_steps, self.sampling.max_new_tokens)
        if self.sampling.temperature == 0.0 and self.group_size > 1:
            raise ValueError(
                f"temperature 0 makes all {self.group_size} rollouts of a prompt equal; use a value above 0, or "
                "group_size 1"
            )
        return self


class SelectStage(StrictModel):
    """Samples for later stages, chosen by the results of an earlier stage and written to RUN/outputs/NAME.jsonl."""

    name: Identifier
    """The stage's name in file names and on the console, unique in the run. Later stages name it in `samples_of`."""
    kind: Literal["select"]
    """Selects this kind of stage."""
    results_of: Identifier
    """The earlier stage whose results are used: a `sample` stage, or an `rl` stage with `track_rewards`."""
    metric: Literal["pass_rate", "first_correct", "reward_mean", "reward_std", "limr"] = "pass_rate"
    """Number that a sample is chosen by. After a `sample` stage, `pass_rate`: share of its rollouts that are
    correct; `first_correct`: index of the first correct rollout, from 1 (number of rollouts + 1 if none is correct).
    After an `rl` stage, over the times the sample was drawn, `reward_mean` and `reward_std`: mean and standard
    deviation of its reward; `limr`: how closely its reward followed the mean of all samples (LIMR)."""
    range: tuple[NonNegativeFloat, NonNegativeFloat | None] = (0.0, None)
    """Keep samples whose `metric` lies between these two, ends included; null sets no upper bound."""
    top_k: PositiveInt | None = None
    """Keep only this many samples: those with the largest values."""
    output: Literal["prompts", "responses"] = "prompts"
    """`prompts` writes the samples. `responses` writes their correct responses, for an `sft` stage with
    `target_field: response`."""
    max_responses: PositiveInt | None = None
    """Keep at most this many correct responses of a sample, the shortest first."""
    correct: tuple[str, ...] = ()
    """Reward terms that decide whether a response of a `sample` stage is correct: all that apply to its sample must
    reach `threshold`."""
    threshold: Number = 1.0
    """Each of these terms must reach this value for a response to be correct."""

    @property
    def reads_rollouts(self) -> bool:
        """True if the stage reads a `sample` stage's rollouts, False if it reads an `rl` stage's tracked rewards."""
        return self.metric in ("pass_rate", "first_correct")

    @model_validator(mode="after")
    def _check_options(self) -> SelectStage:
        low, high = self.range
        if high is not None and high < low:
            raise ValueError(f"range [{low:g}, {high:g}] is empty; write the lower end first")
        if self.reads_rollouts and not self.correct:
            raise ValueError(
                f"metric {self.metric!r} needs `correct`: the reward terms that decide whether a response is correct"
            )
        if not self.reads_rollouts and (self.output == "responses" or self.correct):
            raise ValueError(
                f"metric {self.metric!r} reads tracked rewards, which have no responses: leave out `output` and "
                "`correct`"
            )
        if not self.reads_rollouts and not self.has_default("threshold"):
            raise ValueError(f"threshold is for terms of `correct`, which metric {self.metric!r} does not read")
        if self.max_responses is not None and self.output != "responses":
            raise ValueError("`max_responses` limits correct responses; set `output: responses`")
        return self
