"""Waiting in tests: with limits so generous that only a hang or quadratic time exceeds them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 600.0
"""Seconds after which a wait fails."""
CPU_S = 60.0
"""Seconds of processor time for work in linear time; quadratic time takes far longer."""


def wait_for(condition: Callable[[], object]) -> None:
    """Return once the condition holds; fail if it never does."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@contextmanager
def bounded() -> Iterator[None]:
    """Fail if the block takes more than `CPU_S` of processor time."""
    start = time.process_time()
    yield
    assert time.process_time() - start < CPU_S


def alive(pid: int) -> bool:
    """Return True while a process runs; a zombie does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
