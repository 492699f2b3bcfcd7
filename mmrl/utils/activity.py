"""The current activity of this process. The parts of a run write it, and the console shows it in its live line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Activity:
    """The current activity and its progress.

    Writing takes a microsecond and prints nothing, so it may be done in any loop and on any rank.
    """

    name: str = ""  # an activity of `StepTimer.time`, such as `rollout`, or other words; empty between activities
    started_at: float = 0.0  # of the monotonic clock, in seconds
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # finished parts and all parts, by name

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Make `name` the current activity inside this block."""
        outer = self.name, self.started_at
        self.name, self.started_at = name, time.monotonic()
        try:
            yield
        finally:
            self.name, self.started_at = outer

    def begin_count(self, name: str, total: int) -> None:
        """Begin to count the parts of `name` from 0. Another thread may finish them during another activity."""
        self.counts[name] = (0, total)

    def advance(self, name: str, parts: int = 1) -> None:
        """Count further finished parts of `name`."""
        done, total = self.counts[name]
        self.counts[name] = (done + parts, total)
