"""Stages that make data rather than weights: rollouts written down, and what is chosen of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from mmrl import types
from mmrl.config.schema.base import Positive, Strict, When, Word, holds
from mmrl.config.schema.rollout_steps import ONCE, Steps, UseTools, check_answers_only, check_order, check_room
from mmrl.config.schema.stages import Sampling

AtLeast0 = Annotated[float, Field(ge=0.0)]


class Sample(Strict):
    """Rollouts of the policy as it is, written with their reward terms to RUN/outputs/NAME.jsonl."""

    name: Word
    """Name in file names and on the console; unique in the run."""
    kind: Literal["sample"]
    """Selects this kind of stage."""
    source: Word | None = None
    """An earlier `select` stage whose samples are asked; those of `data.train` when left out."""
    when: When = Field(default_factory=dict)
    """Those of them that are taken, all when empty: allowed values of `task` or of a column of the sample's `meta`."""
    group_size: Positive = 8
    """Rollouts per prompt."""
    prompts_per_step: Positive = 16
    """Prompts that are answered at a time, and written before the next ones."""
    steps: Positive | None = None
    """Steps at most; every sample is asked once when left out."""
    sampling: Sampling = Sampling()
    """How rollouts are drawn."""
    program: Annotated[Steps, AfterValidator(check_order)] = ONCE
    """What is done with a prompt: generate, and perhaps second looks that take their drafts' place."""

    @field_validator("program")
    @classmethod
    def _leaves_plain_responses(cls, program: Steps) -> Steps:
        """What is written is a text for each rollout, without who wrote which part of it."""
        check_answers_only(program, "a sample stage", "writes `group_size` rollouts")
        for step in program:
            if isinstance(step, UseTools):
                raise ValueError(
                    f"step {step.name!r} would write what tools say as if the policy had: a sample stage has no tools"
                )
        return program

    @model_validator(mode="after")
    def _drafts_leave_room(self) -> Sample:
        check_room(self.program, self.sampling.max_new_tokens)
        return self

    def takes(self, sample: types.Sample) -> bool:
        """Whether the stage asks a sample of its source."""
        return holds(self.when, sample)

    @model_validator(mode="after")
    def _rollouts_differ(self) -> Sample:
        if self.sampling.temperature == 0.0 and self.group_size > 1:
            raise ValueError(
                f"temperature 0 makes all {self.group_size} rollouts of a prompt equal; use a value above 0, or "
                "group_size 1"
            )
        return self


class Select(Strict):
    """What later stages train on: chosen of what an earlier stage found out, and written to RUN/outputs/NAME.jsonl."""

    name: Word
    """Name in file names and on the console; unique in the run, and what a later stage's `source` says."""
    kind: Literal["select"]
    """Selects this kind of stage."""
    source: Word
    """The earlier stage that found out: a `sample` stage, or an `rl` stage with `history`."""
    by: Literal["pass_rate", "attempts", "mean", "std", "limr"] = "pass_rate"
    """What a sample is judged by. Of a `sample` stage: the share of its rollouts that is right, or which of them was
    the first (one more than there are if none is). Of an `rl` stage, over the times it was drawn there: mean or
    standard deviation of its reward, or how closely that followed the mean of all samples (LIMR)."""
    within: tuple[AtLeast0, AtLeast0 | None] = (0.0, None)
    """Least and greatest value that is kept; null is no bound."""
    top: Positive | None = None
    """Then only so many, those of the greatest values."""
    keep: Literal["prompts", "responses"] = "prompts"
    """The samples, to be asked anew; or their right responses, for an `sft` stage with `imitate: response`."""
    most: Positive | None = None
    """Right responses of a sample that are kept at most, the shortest first."""
    right: tuple[str, ...] = ()
    """Reward terms that say whether a response of a `sample` stage is right: all of them that apply to it do."""
    right_from: float = 1.0
    """What a term must reach to say so."""

    @property
    def reads_rollouts(self) -> bool:
        """Whether it goes by rollouts, rather than by the history of training."""
        return self.by in ("pass_rate", "attempts")

    @model_validator(mode="after")
    def _parts_fit(self) -> Select:
        low, high = self.within
        if high is not None and high < low:
            raise ValueError(f"within [{low:g}, {high:g}] holds nothing; write the lower end first")
        if self.reads_rollouts and not self.right:
            raise ValueError(f"by {self.by!r} needs `right`: the reward terms that say whether a response is right")
        if not self.reads_rollouts and (self.keep == "responses" or self.right):
            raise ValueError(f"by {self.by!r} goes by history, which has no responses: take out `keep` and `right`")
        if self.most is not None and self.keep != "responses":
            raise ValueError("`most` counts right responses; set `keep: responses`")
        return self
