"""The order in which samples are seen: seeded, endless, and a function of the cursor alone."""

from __future__ import annotations

import random
from collections.abc import Sequence, Set
from math import isnan
from typing import Generic, Protocol, TypeVar

from mmrl.algo.seeds import derive
from mmrl.types import Reject, Sample, UserError

Row = Sample | Reject
"""What a data source gives: a sample, or a row it could not turn into one."""
RowT = TypeVar("RowT", bound=Row)


class Order(Protocol):
    """An endless order of rows. A row that is no sample has a position like any other, so positions are lasting."""

    def take(self, cursor: int, count: int) -> Sequence[Row]:
        """The `count` rows that follow position `cursor`."""


class Shuffled(Generic[RowT]):
    """Every sample once per epoch, in an order drawn anew for each; position `cursor` always means the same sample."""

    def __init__(self, samples: Sequence[RowT], seed: int, *, apart: int = 0) -> None:
        """From epoch to epoch too no sample comes again within `apart` positions, or a third of the samples if that is
        less.
        """
        if not samples:
            raise ValueError("there are no samples to draw from")
        self._samples = samples
        self._seed = seed
        self._apart = min(apart, len(samples) // 3)
        self._drawn: tuple[int, list[int]] = (-1, [])

    def take(self, cursor: int, count: int) -> list[RowT]:
        """The `count` samples that follow position `cursor`."""
        taken: list[RowT] = []
        while len(taken) < count:
            epoch, start = divmod(cursor + len(taken), len(self._samples))
            order = self._order(epoch)
            taken += [self._samples[i] for i in order[start : start + count - len(taken)]]
        return taken

    def _order(self, epoch: int) -> list[int]:
        if self._drawn[0] != epoch:
            order = self._permutation(epoch)
            if epoch and self._apart:
                _keep_away(order, set(self._permutation(epoch - 1)[-self._apart :]), self._apart)
            self._drawn = (epoch, order)
        return self._drawn[1]

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(len(self._samples)))
        random.Random(derive(self._seed, "epoch", epoch)).shuffle(order)
        return order


def _keep_away(order: list[int], recent: Set[int], width: int) -> None:
    """Whatever is recent among the first `width` changes places with what is not, and not among the last `width`: an
    epoch's end stays as it was drawn, so that the next one knows it.
    """
    free = (place for place in range(width, len(order) - width) if order[place] not in recent)
    for place in range(width):
        if order[place] in recent:
            other = next(free)
            order[place], order[other] = order[other], order[place]


class Listed(Generic[RowT]):
    """The same order in every epoch."""

    def __init__(self, samples: Sequence[RowT]) -> None:
        if not samples:
            raise ValueError("there are no samples to draw from")
        self._samples = samples

    def take(self, cursor: int, count: int) -> list[RowT]:
        """The `count` samples that follow position `cursor`."""
        return [self._samples[position % len(self._samples)] for position in range(cursor, cursor + count)]


class Remembered:
    """An order that reads no row twice for those who look ahead, and take again from there more rows or fewer."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._start, self._rows = 0, list[Row]()

    def take(self, cursor: int, count: int) -> list[Row]:
        """The `count` rows that follow position `cursor`."""
        held = self._rows[cursor - self._start :] if cursor >= self._start else []
        missing = count - len(held)
        if missing > 0:
            held += self._order.take(cursor + len(held), missing)
        self._start, self._rows = cursor, held
        return held[:count]


def by_column(samples: Sequence[Sample], column: str, *, descending: bool) -> list[Sample]:
    """Samples in the order of a number in their `meta`; equal ones as they were.

    Raises:
        UserError: a sample has no number there.
    """
    for sample in samples:
        value = sample.meta.get(column)
        if isinstance(value, bool) or not isinstance(value, int | float) or isnan(value):
            raise UserError(f"sample {sample.id}: meta has no number {column!r} to sort by, but {value!r}")
    return sorted(samples, key=lambda sample: float(sample.meta[column]), reverse=descending)
