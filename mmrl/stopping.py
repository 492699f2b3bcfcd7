"""Ctrl-C and SIGTERM: what a run does when it is asked to end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType


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
