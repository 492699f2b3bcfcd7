"""A lock that objects can hold although they are copied and pickled."""

from __future__ import annotations

import _thread


# `threading.RLock` is a function, so its class is taken from where it is defined. typeshed calls it final; it is not.
class PicklableLock(_thread.RLock):  # type: ignore[misc]
    """A reentrant lock for the learner's thread and the thread of asynchronous rollouts.

    A copy, or the same object in another process, is a new and open lock: the state of a lock means nothing there.
    """

    def __reduce__(self) -> tuple[type[PicklableLock], tuple[()]]:
        """Pickle nothing but the class."""
        return PicklableLock, ()
