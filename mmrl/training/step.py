"""One finished training step, and the interface of the callbacks that run after it. Imports without torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from mmrl.types import SelectedExperiences, TrainingState


@dataclass(slots=True, kw_only=True)
class StepResult:
    """Groups, metrics and times of one training step, as the callbacks receive them in turn."""

    selected: SelectedExperiences
    """The step's groups, one advantage for each scored rollout, and what the learner trained on, replay included. In an
    `sft` stage each demonstration is a group of one."""
    metrics: Mapping[str, float]
    """Reproducible numbers of the step: functions of the config and its seed."""
    seconds: Mapping[str, float]
    """Wall-clock time by activity, named `time/<activity>_s`."""
    rollouts_file: str | None = None
    """File with the step's rollouts, set by `StepLogger` when it wrote one."""


class Callback(Protocol):
    """Something to do after each training step.

    Callbacks run on every rank, after the weights were updated and `state.step` was advanced. A callback ends its stage
    by setting `state.stage_done`, on all ranks alike.
    """

    def on_step_end(self, state: TrainingState, result: StepResult) -> None:
        """React to a finished step; `state.step` steps of the stage are done."""


@dataclass(slots=True)
class StepTimer:
    """Accumulates the wall-clock seconds of one step by activity."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by `time/<activity>_s`."""

    @contextmanager
    def time(self, activity: str) -> Iterator[None]:
        """Add the time spent inside this block to `activity`."""
        start = time.perf_counter()
        yield
        name = f"time/{activity}_s"
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
