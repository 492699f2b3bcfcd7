"""A lock that objects can hold although they are copied and pickled."""

from __future__ import annotations

from threading import RLock


class PicklableLock:
    """A reentrant lock for the learner's thread and the thread of asynchronous rollouts.

    A copy, or the same object in another process, is a new and open lock: the state of a lock means nothing there.
    """

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        """Wait for the lock and take it."""
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        """Release the lock once."""
        self._lock.release()

    def __reduce__(self) -> tuple[type[PicklableLock], tuple[()]]:
        """Pickle nothing but the class."""
        return PicklableLock, ()
