"""An order over rows that are read while training goes on, without holding them all in memory."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice

from mmrl.data.order import DataRow
from mmrl.types import UserError
from mmrl.utils.seeds import derive_seed


class StreamingOrder:
    """Passes rows through a shuffle buffer. Each comes once per epoch, at most about `buffer` rows before its turn.

    Going on from the last position costs nothing. A jump to another position reads the rows before it again, at most
    one whole epoch and a part of another.
    """

    def __init__(self, open_rows: Callable[[], Iterable[DataRow]], *, buffer: int, seed: int) -> None:
        """Create an order.

        Args:
            open_rows: starts a pass over the rows, the same ones each time; it may be endless.
            buffer: rows that are held to be shuffled.
            seed: of the shuffling.
        """
        self._open_rows, self._buffer, self._seed = open_rows, buffer, seed
        self._position = 0
        self._rows = self._rows_from_epoch(0)

    def take(self, start_position: int, count: int) -> list[DataRow]:
        """Return the `count` rows from `start_position` on.

        Raises:
            UserError: there are no rows, or `open_rows` cannot read them.
        """
        if start_position != self._position:
            self._rows = self._rows_from_position(start_position)
        self._position = start_position + count
        return list(islice(self._rows, count))

    def _rows_from_position(self, start_position: int) -> Iterator[DataRow]:
        rows = self._shuffle_epoch(0)
        num_passed = sum(1 for _ in islice(rows, start_position))
        if num_passed == start_position:
            return chain(rows, self._rows_from_epoch(1))
        # The first epoch ended before the position, so its length is known now, and all epochs are equally long.
        epoch, start = divmod(start_position, num_passed)
        rows = self._rows_from_epoch(epoch)
        deque(islice(rows, start), maxlen=0)
        return rows

    def _rows_from_epoch(self, first: int) -> Iterator[DataRow]:
        for epoch in count(first):
            yield from self._shuffle_epoch(epoch)

    def _shuffle_epoch(self, epoch: int) -> Iterator[DataRow]:
        rng = random.Random(derive_seed(self._seed, "stream", epoch))
        rows = iter(self._open_rows())
        held = list(islice(rows, self._buffer))
        if not held:
            raise UserError("data.train: a streamed source gave no rows; look at its path and options")
        for row in rows:
            index = rng.randrange(len(held))
            drawn, held[index] = held[index], row
            yield drawn
        rng.shuffle(held)
        yield from held
