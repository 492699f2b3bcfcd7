"""The order in which a stage meets its samples."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from mmrl.config.schema.base import NonNegativeInt, PositiveInt, SampleConditions, StrictModel, matches_conditions
from mmrl.types import Sample

PositiveFraction = Annotated[float, Field(gt=0.0, le=1.0)]
Weight = Annotated[float, Field(ge=0.0)]


class ShuffledOrderConfig(StrictModel):
    """Every sample once per epoch, in an order drawn anew for each; sources with a `weight` in their shares."""

    kind: Literal["shuffled"]
    """Selects this order."""


class SortedOrderConfig(StrictModel):
    """The same order in every epoch: as the sources give it, or by a column (easy to hard, say)."""

    kind: Literal["sorted"]
    """Selects this order."""
    column: str | None = None
    """Column of `meta` that holds a number; the sources' own order without it."""
    descending: bool = False
    """From the greatest to the least."""


class MixtureOrderConfig(StrictModel):
    """Shares of the training sources that change over the steps of the stage."""

    kind: Literal["mixture"]
    """Selects this order."""
    points: Annotated[tuple[tuple[NonNegativeInt, tuple[Weight, ...]], ...], Field(min_length=1)]
    """Pairs of step (from 0) and a weight for each training source, of which 0 leaves it out; before the first and
    after the last it stays. A step is one round of prompts."""
    interpolation: Literal["linear", "steps"] = "linear"
    """Between two points: a straight line, or the earlier one's weights."""

    @model_validator(mode="after")
    def _check_points(self) -> MixtureOrderConfig:
        steps = [step for step, _ in self.points]
        if any(later <= earlier for earlier, later in pairwise(steps)):
            raise ValueError(f"steps must rise from point to point, got {', '.join(map(str, steps))}")
        if empty := [step for step, weights in self.points if not any(weights)]:
            raise ValueError(f"the weights at step {empty[0]} are all 0: nothing could be drawn; set one above 0")
        return self


class PlateauConfig(StrictModel):
    """No progress: the mean of the `history` terms over `window` steps is not `rise` above the window before it."""

    window: PositiveInt = 20
    """Steps that are averaged."""
    min_improvement: Weight = 0.01
    """What counts as progress."""


class CurriculumPhaseConfig(StrictModel):
    """A part of a curriculum; the last one lasts until the stage ends."""

    when: SampleConditions = Field(default_factory=dict)
    """Samples of the phase, all when empty: allowed values of `task` or of a column of the sample's `meta`."""
    max_samples: PositiveInt | None = None
    """The phase ends once so many samples were drawn in it."""
    plateau: PlateauConfig | None = None
    """The phase ends once the reward stops rising."""

    def matches(self, sample: Sample) -> bool:
        """Whether the sample meets every condition of `when`."""
        return matches_conditions(self.when, sample)


class CurriculumOrderConfig(StrictModel):
    """One phase after another, each with samples of its own, shuffled."""

    kind: Literal["curriculum"]
    """Selects this order."""
    phases: Annotated[tuple[CurriculumPhaseConfig, ...], Field(min_length=2)]
    """The phases."""

    @model_validator(mode="after")
    def _check_phases(self) -> CurriculumOrderConfig:
        *earlier, last = self.phases
        if endless := [k for k, phase in enumerate(earlier) if phase.max_samples is None and phase.plateau is None]:
            raise ValueError(f"phase {endless[0]} never ends, and others follow; give it `samples` or `plateau`")
        if last.max_samples is not None or last.plateau is not None:
            raise ValueError("the last phase lasts until the stage ends; it takes neither `samples` nor `plateau`")
        return self


class PriorityOrderConfig(StrictModel):
    """Samples drawn for every step with probabilities that follow from their own `history`, never twice in a step."""

    kind: Literal["priority"]
    """Selects this order."""
    weight_by: Literal["uncertainty", "failure"] = "uncertainty"
    """The weight, p being the sample's reward when it was last drawn: 4 p (1 - p), or 1 - p (Kimi k1.5). A sample not
    drawn yet has weight 1."""
    min_weight: PositiveFraction = 0.05
    """The least weight: what was too hard or too easy is looked at again now and then."""


DataOrderConfig: TypeAlias = Annotated[
    ShuffledOrderConfig | SortedOrderConfig | MixtureOrderConfig | CurriculumOrderConfig | PriorityOrderConfig,
    Field(discriminator="kind"),
]
