"""The four trackers by name. The library of each is imported with its own file, when it is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Final

from mmrl.config.schema.trackers import AnyTracker, MlflowConfig, TensorboardConfig, TrackioConfig, WandbConfig
from mmrl.trackers.tracker import RunFacts, Tracker
from mmrl.types import UserError

PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
"""Packages that each kind of tracker imports; the extra of mmrl that installs them has the kind's name."""


def check_trackers(trackers: Sequence[AnyTracker]) -> None:
    """Check that the libraries of trackers are installed, without importing them.

    Raises:
        UserError: one is not; the message has the pip line.
    """
    for index, tracker in enumerate(trackers):
        missing = [package for package in PACKAGES[tracker.kind] if find_spec(package) is None]
        if missing:
            error = UserError(
                f"{missing[0]} is not installed; pip install 'mmrl[{tracker.kind}]', or take {tracker.kind} out"
            )
            error.key = f"logging.trackers.{index}.kind"
            raise error


def open_tracker(options: AnyTracker, run: RunFacts) -> Tracker:
    """Start a run in a tracker, or continue the one with this id. Raises what its library raises."""
    match options:
        case TensorboardConfig():
            from mmrl.trackers.tensorboard import TensorboardTracker

            return TensorboardTracker(run)
        case WandbConfig():
            from mmrl.trackers.wandb import WandbTracker

            return WandbTracker(options, run)
        case TrackioConfig():
            from mmrl.trackers.trackio import TrackioTracker

            return TrackioTracker(options, run)
        case MlflowConfig():
            from mmrl.trackers.mlflow import MlflowTracker

            return MlflowTracker(options, run)
