"""The order in which a stage meets its samples."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from mmrl.config.schema.base import Count, Positive, Strict, When, holds
from mmrl.types import Sample

Above0UpTo1 = Annotated[float, Field(gt=0.0, le=1.0)]
Weight = Annotated[float, Field(ge=0.0)]


class Shuffled(Strict):
    """Every sample once per epoch, in an order drawn anew for each; sources with a `weight` in their shares."""

    kind: Literal["shuffled"]
    """Selects this order."""


class Sorted(Strict):
    """The same order in every epoch: as the sources give it, or by a column (easy to hard, say)."""

    kind: Literal["sorted"]
    """Selects this order."""
    by: str | None = None
    """Column of `meta` that holds a number; the sources' own order without it."""
    descending: bool = False
    """From the greatest to the least."""


class Mixture(Strict):
    """Shares of the training sources that change over the steps of the stage."""

    kind: Literal["mixture"]
    """Selects this order."""
    points: Annotated[tuple[tuple[Count, tuple[Weight, ...]], ...], Field(min_length=1)]
    """Pairs of step (from 0) and a weight for each training source, of which 0 leaves it out; before the first and
    after the last it stays. A step is one round of prompts."""
    shape: Literal["linear", "steps"] = "linear"
    """Between two points: a straight line, or the earlier one's weights."""

    @model_validator(mode="after")
    def _points_make_sense(self) -> Mixture:
        steps = [step for step, _ in self.points]
        if any(later <= earlier for earlier, later in pairwise(steps)):
            raise ValueError(f"steps must rise from point to point, got {', '.join(map(str, steps))}")
        if empty := [step for step, weights in self.points if not any(weights)]:
            raise ValueError(f"the weights at step {empty[0]} are all 0: nothing could be drawn; set one above 0")
        return self


class Plateau(Strict):
    """No progress: the mean of the `history` terms over `window` steps is not `rise` above the window before it."""

    window: Positive = 20
    """Steps that are averaged."""
    rise: Weight = 0.01
    """What counts as progress."""


class Phase(Strict):
    """A part of a curriculum; the last one lasts until the stage ends."""

    when: When = Field(default_factory=dict)
    """Samples of the phase, all when empty: allowed values of `task` or of a column of the sample's `meta`."""
    samples: Positive | None = None
    """The phase ends once so many samples were drawn in it."""
    plateau: Plateau | None = None
    """The phase ends once the reward stops rising."""

    def holds(self, sample: Sample) -> bool:
        """Whether the sample meets every condition of `when`."""
        return holds(self.when, sample)


class Curriculum(Strict):
    """One phase after another, each with samples of its own, shuffled."""

    kind: Literal["curriculum"]
    """Selects this order."""
    phases: Annotated[tuple[Phase, ...], Field(min_length=2)]
    """The phases."""

    @model_validator(mode="after")
    def _phases_end(self) -> Curriculum:
        *earlier, last = self.phases
        if endless := [k for k, phase in enumerate(earlier) if phase.samples is None and phase.plateau is None]:
            raise ValueError(f"phase {endless[0]} never ends, and others follow; give it `samples` or `plateau`")
        if last.samples is not None or last.plateau is not None:
            raise ValueError("the last phase lasts until the stage ends; it takes neither `samples` nor `plateau`")
        return self


class Priority(Strict):
    """Samples drawn for every step with probabilities that follow from their own `history`, never twice in a step."""

    kind: Literal["priority"]
    """Selects this order."""
    by: Literal["uncertainty", "failure"] = "uncertainty"
    """The weight, p being the sample's reward when it was last drawn: 4 p (1 - p), or 1 - p (Kimi k1.5). A sample not
    drawn yet has weight 1."""
    floor: Above0UpTo1 = 0.05
    """The least weight: what was too hard or too easy is looked at again now and then."""


Order: TypeAlias = Annotated[Shuffled | Sorted | Mixture | Curriculum | Priority, Field(discriminator="kind")]
