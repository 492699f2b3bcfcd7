"""A cache whose size is bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class ByteCache(Generic[KeyT, ValueT]):
    """Values by key; the least recently used ones leave when all together take more than `max_bytes`."""

    def __init__(self, max_bytes: int, *, keep_last: bool = True) -> None:
        """With `keep_last`, the value that was put in last stays, even if it exceeds the bound by itself."""
        self._max_bytes, self._keep_last = max_bytes, keep_last
        self._entries: OrderedDict[KeyT, tuple[ValueT, int]] = OrderedDict()
        self._used_bytes = 0

    def get(self, key: KeyT) -> ValueT | None:
        """Return the value of a key, which then counts as the one used last; None if it is not in the cache."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: KeyT, value: ValueT, num_bytes: int, *, is_pinned: Callable[[KeyT], bool] | None = None) -> None:
        """Put a value in, in place of an earlier one of this key; if the cache is full, others leave, unless pinned."""
        self._remove(key)
        self._entries[key] = (value, num_bytes)
        self._used_bytes += num_bytes
        excess, leaving = self._used_bytes - self._max_bytes, []
        # No entry after those that leave is looked at: a full cache may hold a hundred thousand small images.
        for candidate, (_, size) in self._entries.items():
            if excess <= 0 or (self._keep_last and candidate == key):
                break
            if is_pinned is None or not is_pinned(candidate):
                leaving.append(candidate)
                excess -= size
        for candidate in leaving:
            self._remove(candidate)

    def _remove(self, key: KeyT) -> None:
        if key in self._entries:
            self._used_bytes -= self._entries.pop(key)[1]
