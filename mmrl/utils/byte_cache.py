"""A cache whose size is bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class ByteCache(Generic[KeyT, ValueT]):
    """Values by key. The least recently used ones are removed when all together exceed `max_bytes`."""

    def __init__(self, max_bytes: int, *, keep_last: bool = True) -> None:
        """Create an empty cache. With `keep_last`, the last value put in stays even if it alone exceeds the bound."""
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
        """Store a value, replacing an earlier one of this key. If the cache is full, unpinned others are removed.

        Without `keep_last`, a value that alone exceeds the bound is not stored, and removes no others.
        """
        if key in self._entries:
            self._used_bytes -= self._entries.pop(key)[1]
        if num_bytes > self._max_bytes and not self._keep_last:
            return
        self._entries[key] = (value, num_bytes)
        self._used_bytes += num_bytes
        leaving = []
        excess = self._used_bytes - self._max_bytes
        # The loop stops once enough entries leave: a full cache may hold a hundred thousand small images.
        for candidate, (_, size) in self._entries.items():
            if excess <= 0 or (self._keep_last and candidate == key):
                break
            if is_pinned is None or not is_pinned(candidate):
                leaving.append(candidate)
                excess -= size
        for candidate in leaving:
            self._used_bytes -= self._entries.pop(candidate)[1]
