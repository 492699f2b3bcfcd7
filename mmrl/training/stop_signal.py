"""Ctrl-C and SIGTERM, which ask a run to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from mmrl.distributed.ranks import Ranks
from mmrl.utils.worker_pool import STOP_REQUESTED


@dataclass(slots=True)
class StopSignal:
    """Records whether the user has asked this process to stop, by SIGINT or SIGTERM."""

    warn: Callable[[str], None]  # receives a message when the run will stop after the current step
    received: int | None = None  # number of the signal that arrived, if any

    def reached_any(self, ranks: Ranks) -> bool:
        """Return True on all ranks if a signal has reached one of them. Collective."""
        return any(ranks.all_gather(self.received is not None))

    @contextmanager
    def handle(self, *signals: signal.Signals, finish_step: bool) -> Iterator[None]:
        """Raise KeyboardInterrupt when one of `signals` arrives inside this block.

        With `finish_step`, the first signal is only recorded, so that the step can end and be saved; a second one
        raises. Outside the main thread this does nothing, because only the main thread receives signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def receive(number: int, _frame: FrameType | None) -> None:
            if finish_step and self.received is not None:
                raise KeyboardInterrupt
            self.received = number
            STOP_REQUESTED.set()
            if not finish_step:
                raise KeyboardInterrupt
            self.warn("Stopping once this step is saved, if no reward or tool hangs; interrupt again to stop at once.")

        previous_handlers = {number: signal.signal(number, receive) for number in signals}
        try:
            yield
        finally:
            STOP_REQUESTED.clear()
            for number, previous in previous_handlers.items():
                signal.signal(number, previous)
