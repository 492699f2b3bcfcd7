"""SIGINT and SIGTERM: a first signal during a stage ends the run after the step in progress, a second one at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType

SignalHandler = Callable[[int, FrameType | None], None]


@dataclass(slots=True)
class StopSignal:
    """Records whether the user has asked this process to stop."""

    warn: Callable[[str], None]
    """Receives a message when a stop after the current step was requested."""
    signal: int | None = None
    """Number of the signal that arrived, if any; the exit code derives from it."""

    def interrupt_at_once(self) -> AbstractContextManager[None]:
        """Inside this block let SIGTERM raise KeyboardInterrupt, as Ctrl-C does."""
        return _handle_signals(self._raise_interrupt, signal.SIGTERM)

    def stop_after_step(self) -> AbstractContextManager[None]:
        """Inside this block let a first signal only set `signal`, so that the step can end and be saved."""
        return _handle_signals(self._request_stop, signal.SIGINT, signal.SIGTERM)

    def requested(self) -> bool:
        """Return True once a signal has arrived."""
        return self.signal is not None

    def _raise_interrupt(self, signal_number: int, _frame: FrameType | None) -> None:
        self.signal = signal_number
        raise KeyboardInterrupt

    def _request_stop(self, signal_number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal_number
        self.warn("Stopping: the step in progress will be finished and saved. Interrupt again to stop at once.")


@contextmanager
def _handle_signals(handler: SignalHandler, *signals: signal.Signals) -> Iterator[None]:
    previous_handlers = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)
