"""The methods that each tracker has, and what they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from PIL.Image import Image

Points = set[tuple[int, str]]
"""The (global step, metric) of values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a tracker is told once about the run."""

    id: str  # identifies the run in the tracker, over all its resumes
    name: str  # `run.name`
    project: str  # `logging.project`
    folder: Path  # run directory
    config: Mapping[str, object]  # every setting by dotted path, and versions, git commit and platform


@dataclass(slots=True, kw_only=True)
class Row:
    """Finite metrics and times of one step."""

    step: int  # global step: the training steps of all stages up to this one
    values: dict[str, float]  # by metric
    rollouts: Path | None = None  # file with the step's rollouts, if they were kept


class Picture(NamedTuple):
    """A rollout to look at."""

    image: Image  # what it was asked about, with boxes drawn on it
    text: str  # question, target, response and reward


class Tracker(Protocol):
    """A run in a tracker. Methods return once what they were given would survive a kill of this process."""

    def begin(self, step: int, sent: Points) -> Points:
        """Return what the tracker has from global step `step` on, where the mark is; the mark knows of `sent`."""

    def log(self, rows: Sequence[Row]) -> None:
        """Add rows, whose steps rise."""

    def log_pictures(self, step: int, pictures: Sequence[Picture]) -> None:
        """Add pictures of a step's rollouts."""

    def end(self, status: str, summary: Mapping[str, float]) -> None:
        """Add the summary, and end the run as "finished", "stopped" by the user, or "failed"."""
