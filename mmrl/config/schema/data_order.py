"""Key `stages[].data_order`: the order in which a stage draws its samples."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from mmrl.config.schema.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFraction,
    PositiveInt,
    SampleConditions,
    StrictModel,
    check_rising_steps,
    describe_conditions,
)


class ShuffledOrderConfig(StrictModel):
    """Every sample once per epoch, shuffled anew for each; weighted sources in their shares."""

    kind: Literal["shuffled"]
    """Selects this order."""

    def describe(self) -> str:
        """Return the order as a phrase."""
        return "shuffled anew for each epoch; sources with a weight in their shares"


class SortedOrderConfig(StrictModel):
    """One order for every epoch: that of the sources, or by a column (easy to hard, for example)."""

    kind: Literal["sorted"]
    """Selects this order."""
    column: str | None = None
    """Column of `meta` that holds a number; without it, the sources' own order."""
    descending: bool = False
    """Draw the largest numbers first."""

    def describe(self) -> str:
        """Return the order as a phrase."""
        return f"by {self.column or 'their sources'}{', descending' if self.descending else ''}, the same every epoch"


class MixtureOrderConfig(StrictModel):
    """Shares of the training sources that change over the steps of the stage."""

    kind: Literal["mixture"]
    """Selects this order."""
    points: Annotated[tuple[tuple[NonNegativeInt, tuple[NonNegativeFloat, ...]], ...], Field(min_length=1)]
    """Pairs of a step (from 0) and a weight for each training source; weight 0 leaves a source out. The weights are
    constant before the first step and after the last one. A step is one round of prompts."""
    interpolation: Literal["linear", "steps"] = "linear"
    """Between two points: linear, or the weights of the earlier one."""

    @model_validator(mode="after")
    def _check_points(self) -> MixtureOrderConfig:
        check_rising_steps([step for step, _ in self.points])
        for step, weights in self.points:
            if not any(weights):
                raise ValueError(f"the weights at step {step} are all 0: nothing could be drawn; set one above 0")
        return self

    def describe(self) -> str:
        """Return the order as a phrase."""
        points = []
        for step, weights in self.points:
            shares = ":".join(f"{weight:g}" for weight in weights)
            points.append(f"{shares} at step {step}")
        between = "in steps" if self.interpolation == "steps" else "linear between"
        return f"sources mixed {', '.join(points)}, {between}"


class PlateauConfig(StrictModel):
    """A stop of progress, measured by the mean of the `track_rewards` terms.

    The mean over `window` steps is less than `min_improvement` above that of the window before.
    """

    window: PositiveInt = 20
    """Steps that are averaged."""
    min_improvement: NonNegativeFloat = 0.01
    """Rise of the mean reward that counts as progress."""


class CurriculumPhaseConfig(StrictModel):
    """A phase of a curriculum; the last one lasts until the stage ends."""

    when: SampleConditions = Field(default_factory=dict)
    """Samples of the phase: allowed values of `task` or of a column of `meta`. All samples when empty."""
    max_samples: PositiveInt | None = None
    """The phase ends after so many samples were drawn in it."""
    plateau: PlateauConfig | None = None
    """The phase ends when the reward stops rising."""

    def describe(self) -> str:
        """Return the samples and the end of the phase as a phrase."""
        ends = []
        if self.max_samples:
            ends.append(f"{self.max_samples} samples were drawn")
        if self.plateau:
            window, rise = self.plateau.window, self.plateau.min_improvement
            ends.append(f"the mean of {window} steps is less than {rise:g} above that of the {window} before")
        samples = f"samples of which {describe_conditions(self.when)}" if self.when else "all samples"
        return f"{samples}, until {' or '.join(ends)}" if ends else samples


class CurriculumOrderConfig(StrictModel):
    """Phases one after another, each with its own samples, shuffled."""

    kind: Literal["curriculum"]
    """Selects this order."""
    phases: Annotated[tuple[CurriculumPhaseConfig, ...], Field(min_length=2)]
    """The phases in their order."""

    @model_validator(mode="after")
    def _check_phases(self) -> CurriculumOrderConfig:
        for index, phase in enumerate(self.phases[:-1]):
            if phase.max_samples is None and phase.plateau is None:
                raise ValueError(f"phase {index} never ends, and others follow; give it `max_samples` or `plateau`")
        last = self.phases[-1]
        if last.max_samples is not None or last.plateau is not None:
            raise ValueError("the last phase lasts until the stage ends; it takes neither `max_samples` nor `plateau`")
        return self

    def describe(self) -> str:
        """Return the phases, a line each."""
        return "\n".join(f"phase {index}: {phase.describe()}" for index, phase in enumerate(self.phases))


class PriorityOrderConfig(StrictModel):
    """Samples drawn for every step with probabilities that follow from their tracked rewards, never twice in a step."""

    kind: Literal["priority"]
    """Selects this order."""
    weight_by: Literal["uncertainty", "failure"] = "uncertainty"
    """Weight of a sample whose mean reward was p when it was last drawn: 4 p (1 - p), or 1 - p (Kimi k1.5). A sample
    not drawn yet has weight 1."""
    min_weight: PositiveFraction = 0.05
    """Least weight, so that samples that were too hard or too easy are drawn again now and then."""

    def describe(self) -> str:
        """Return the order as a phrase."""
        weight = "4 p (1 - p)" if self.weight_by == "uncertainty" else "1 - p"
        return f"drawn in proportion to {weight}, at least {self.min_weight:g}, p a sample's last mean reward"


DataOrderConfig: TypeAlias = Annotated[
    ShuffledOrderConfig | SortedOrderConfig | MixtureOrderConfig | CurriculumOrderConfig | PriorityOrderConfig,
    Field(discriminator="kind"),
]
