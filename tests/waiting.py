"""Waiting in tests. What they look for never comes, or takes for ever, so they are patient with any machine."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 600.0
"""Seconds after which what was awaited will not come."""
CPU_S = 60.0
"""Seconds of processor time that work may take that, done badly, would take far longer."""


def wait_for(condition: Callable[[], object]) -> None:
    """Return once the condition holds; fail if it never does."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@contextmanager
def bounded() -> Iterator[None]:
    """Work that grows with its input and no faster."""
    start = time.process_time()
    yield
    assert time.process_time() - start < CPU_S
