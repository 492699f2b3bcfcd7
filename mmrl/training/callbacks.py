"""A run as a list of stages, each from the previous one's weights: what stands around the loops."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import fmean
from types import FrameType
from typing import Protocol

from mmrl.config.schema import Validation
from mmrl.ports import Gate
from mmrl.types import HeldOut, Interrupted, State


class HeldOutGate:
    """Looks at held-out reward every so many steps, and ends the stage once it is high enough, if a goal is set.

    `note` is told the mean reward of each task and over tasks, and what the rollout program counted.
    """

    def __init__(
        self,
        look: Callable[[], HeldOut],
        note: Callable[[State, Mapping[str, float], Mapping[str, float]], None],
        options: Validation,
    ) -> None:
        self._look, self._note, self._options = look, note, options

    def passed(self, state: State) -> bool:
        """Look when a look is due; True ends the stage."""
        if state.step % self._options.every:
            return False
        held_out = self._look()
        means = {task: fmean(rewards.values()) for task, rewards in held_out.rewards.items()}
        overall = fmean(means.values())
        self._note(state, {**means, "mean": overall}, held_out.counts)
        goal, goal_each = self._options.until, self._options.until_each
        return goal is not None and overall >= goal and (goal_each is None or min(means.values()) >= goal_each)


class AlsoLooking:
    """A gate before which `look` is called after every step; it looks when something is due."""

    def __init__(self, look: Callable[[State], None], gate: Gate) -> None:
        self._look, self._gate = look, gate

    def passed(self, state: State) -> bool:
        """Look, then as the gate says."""
        self._look(state)
        return self._gate.passed(state)


class OpenGate:
    """Never ends a stage early."""

    def passed(self, state: State) -> bool:
        """False: the stage runs all its steps."""
        return False


class Shelf(Protocol):
    """Where checkpoints are written, perhaps in the background."""

    def check(self) -> None:
        """Raises UserError when a write in the background has failed."""

    def settle(self) -> None:
        """Wait until nothing is being written; raises as `check`."""


class Saver:
    """Saves every so many steps, and at once when the user wants to stop."""

    def __init__(
        self, save: Callable[[State], None], shelf: Shelf, stop_wanted: Callable[[], bool], *, every: int
    ) -> None:
        self._save, self._shelf, self._stop_wanted, self._every = save, shelf, stop_wanted, every

    def keep(self, state: State) -> None:
        """Called after every step.

        Raises:
            Interrupted: the user wanted to stop; everything is saved.
            UserError: this checkpoint, or the one before, cannot be written.
        """
        self._shelf.check()
        if self._stop_wanted() or state.step % self._every == 0:
            self._save(state)
            if self._stop_wanted():  # perhaps only while it was saved
                self._shelf.settle()
                raise Interrupted


@dataclass(slots=True)
class Stop:
    """The user's wish to stop: during a stage a first signal lets the step end and saves; others stop at once."""

    warn: Callable[[str], None]
    signal: int | None = None

    def caught(self) -> AbstractContextManager[None]:
        """Inside this block SIGTERM ends what is being done as Ctrl-C does."""
        return _handling(self._end, signal.SIGTERM)

    def heeded(self) -> AbstractContextManager[None]:
        """Inside this block a first signal lets the step end and saves."""
        return _handling(self._note, signal.SIGINT, signal.SIGTERM)

    def wanted(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    def _end(self, which: int, _frame: FrameType | None) -> None:
        self.signal = which
        raise KeyboardInterrupt

    def _note(self, which: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = which
        self.warn("Stopping: the step in progress is finished and saved. Once more to stop at once.")


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None], *signals: signal.Signals) -> Iterator[None]:
    kept = {which: signal.signal(which, handler) for which in signals}
    try:
        yield
    finally:
        for which, before in kept.items():
            signal.signal(which, before)
