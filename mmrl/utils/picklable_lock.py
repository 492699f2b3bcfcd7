"""Taking turns: what the thread that learns and the thread that draws ahead both use."""

from __future__ import annotations

from threading import RLock


class PicklableLock:
    """A lock for one thread at a time, which may take it again. A copy, or one in another process, is a lock anew."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        """Wait for one's turn."""
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        """The next one, please."""
        self._lock.release()

    def __reduce__(self) -> tuple[type[PicklableLock], tuple[()]]:
        """Nothing of a lock is kept."""
        return PicklableLock, ()
