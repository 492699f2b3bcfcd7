"""The methods of a tracker, and what they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from PIL.Image import Image

RunStatus = Literal["finished", "stopped", "failed"]
"""How a run ended: with its last stage, at the user's request, or by an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a tracker is told once about the run."""

    id: str  # identifies the run in the tracker, over all its resumes
    name: str  # `run.name`
    folder: Path  # run directory
    config: Mapping[str, object]  # every setting by dotted path
    facts: Mapping[str, str]  # versions, git commit and platform, from manifest.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The finite metrics of one line of metrics.jsonl or timings.jsonl."""

    global_step: int  # training steps before this line over all stages, those of the current stage included
    stage: str | None  # None between stages
    values: Mapping[str, float]  # by metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A box on a picture."""

    corners: tuple[float, float, float, float]  # left, top, right, bottom as fractions of width and height
    is_gold: bool  # True for the target's, False for one that the model predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A rollout to look at: the image that it was asked about, and what was said."""

    image: Image
    boxes: Sequence[Box]
    text: str  # question, response and reward


class Tracker(Protocol):
    """A run in a tracker. Methods return once what they were given would survive a kill of this process."""

    rewinds: bool
    """True if `known_points` takes back all that the tracker has from its step on, pictures too, to be sent again."""

    def known_points(self, since: int) -> set[tuple[int, str]] | None:
        """Return the (global step, metric) at global step `since` or later that the tracker has already.

        It is called once, before anything is logged. None means that it cannot tell.
        """

    def log(self, points: Sequence[Point]) -> None:
        """Add points; their global steps may fall where the two files alternate."""

    def show(self, global_step: int, pictures: Sequence[Picture]) -> None:
        """Add pictures of a step's rollouts."""

    def finish(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        """Add the summary, and end the run in the tracker."""
