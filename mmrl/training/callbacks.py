"""A run as a list of stages, each from the previous one's weights: what stands around the loops."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import fmean
from types import FrameType
from typing import Protocol

from mmrl.config.schema import ValidationConfig
from mmrl.ports import StopCriterion
from mmrl.types import EvalRewards, RunInterrupted, TrainingState


class ValidationGoal:
    """Looks at held-out reward every so many steps, and ends the stage once it is high enough, if a goal is set.

    `note` is told the mean reward of each task and over tasks, and what the rollout program counted.
    """

    def __init__(
        self,
        evaluate: Callable[[], EvalRewards],
        log_means: Callable[[TrainingState, Mapping[str, float], Mapping[str, float]], None],
        options: ValidationConfig,
    ) -> None:
        self._evaluate, self._log_means, self._options = evaluate, log_means, options

    def should_stop(self, state: TrainingState) -> bool:
        """Look when a look is due; True ends the stage."""
        if state.step % self._options.every:
            return False
        held_out = self._evaluate()
        means = {task: fmean(rewards.values()) for task, rewards in held_out.rewards.items()}
        overall = fmean(means.values())
        self._log_means(state, {**means, "mean": overall}, held_out.rollout_metrics)
        goal, goal_each = self._options.stop_at_mean_reward, self._options.stop_at_task_reward
        return goal is not None and overall >= goal and (goal_each is None or min(means.values()) >= goal_each)


class AlsoLooking:
    """A gate before which `look` is called after every step; it looks when something is due."""

    def __init__(self, look: Callable[[TrainingState], None], gate: StopCriterion) -> None:
        self._look, self._gate = look, gate

    def should_stop(self, state: TrainingState) -> bool:
        """Look, then as the gate says."""
        self._look(state)
        return self._gate.should_stop(state)


class OpenGate:
    """Never ends a stage early."""

    def should_stop(self, state: TrainingState) -> bool:
        """False: the stage runs all its steps."""
        return False


class CheckpointWriter(Protocol):
    """Where checkpoints are written, perhaps in the background."""

    def raise_if_failed(self) -> None:
        """Raises UserError when a write in the background has failed."""

    def wait(self) -> None:
        """Wait until nothing is being written; raises as `check`."""


class PeriodicCheckpointer:
    """Saves every so many steps, and at once when the user wants to stop."""

    def __init__(
        self,
        save: Callable[[TrainingState], None],
        writer: CheckpointWriter,
        stop_requested: Callable[[], bool],
        *,
        every: int,
    ) -> None:
        self._save, self._writer, self._stop_requested, self._every = save, writer, stop_requested, every

    def save(self, state: TrainingState) -> None:
        """Called after every step.

        Raises:
            Interrupted: the user wanted to stop; everything is saved.
            UserError: this checkpoint, or the one before, cannot be written.
        """
        self._writer.raise_if_failed()
        if self._stop_requested() or state.step % self._every == 0:
            self._save(state)
            if self._stop_requested():  # perhaps only while it was saved
                self._writer.wait()
                raise RunInterrupted


@dataclass(slots=True)
class StopSignal:
    """The user's wish to stop: during a stage a first signal lets the step end and saves; others stop at once."""

    warn: Callable[[str], None]
    signal: int | None = None

    def interrupt_at_once(self) -> AbstractContextManager[None]:
        """Inside this block SIGTERM ends what is being done as Ctrl-C does."""
        return _handle_signals(self._raise_interrupt, signal.SIGTERM)

    def stop_after_step(self) -> AbstractContextManager[None]:
        """Inside this block a first signal lets the step end and saves."""
        return _handle_signals(self._request_stop, signal.SIGINT, signal.SIGTERM)

    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    def _raise_interrupt(self, which: int, _frame: FrameType | None) -> None:
        self.signal = which
        raise KeyboardInterrupt

    def _request_stop(self, which: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = which
        self.warn("Stopping: the step in progress is finished and saved. Once more to stop at once.")


@contextmanager
def _handle_signals(handler: Callable[[int, FrameType | None], None], *signals: signal.Signals) -> Iterator[None]:
    kept = {which: signal.signal(which, handler) for which in signals}
    try:
        yield
    finally:
        for which, before in kept.items():
            signal.signal(which, before)
