"""The order in which samples are seen: seeded, endless, and a function of the cursor alone."""

from __future__ import annotations

import random
from collections.abc import Sequence, Set
from math import isnan
from typing import Generic, Protocol, TypeVar

from mmrl.algo.seeds import derive_seed
from mmrl.types import RejectedRow, Sample, UserError

DataRow = Sample | RejectedRow
"""What a data source gives: a sample, or a row it could not turn into one."""
RowT = TypeVar("RowT", bound=DataRow)


class DataOrder(Protocol):
    """An endless order of rows. A row that is no sample has a position like any other, so positions are lasting."""

    def take(self, start_position: int, count: int) -> Sequence[DataRow]:
        """The `count` rows that follow position `cursor`."""


class ShuffledOrder(Generic[RowT]):
    """Every sample once per epoch, in an order drawn anew for each; position `cursor` always means the same sample."""

    def __init__(self, samples: Sequence[RowT], seed: int, *, min_gap: int = 0) -> None:
        """From epoch to epoch too no sample comes again within `apart` positions, or a third of the samples if that is
        less.
        """
        if not samples:
            raise ValueError("there are no samples to draw from")
        self._samples = samples
        self._seed = seed
        self._min_gap = min(min_gap, len(samples) // 3)
        self._cached_epoch: tuple[int, list[int]] = (-1, [])

    def take(self, start_position: int, count: int) -> list[RowT]:
        """The `count` samples that follow position `cursor`."""
        taken: list[RowT] = []
        while len(taken) < count:
            epoch, start = divmod(start_position + len(taken), len(self._samples))
            order = self._epoch_order(epoch)
            taken += [self._samples[i] for i in order[start : start + count - len(taken)]]
        return taken

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._cached_epoch[0] != epoch:
            order = self._permutation(epoch)
            if epoch and self._min_gap:
                _separate_recent(order, set(self._permutation(epoch - 1)[-self._min_gap :]), self._min_gap)
            self._cached_epoch = (epoch, order)
        return self._cached_epoch[1]

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(len(self._samples)))
        random.Random(derive_seed(self._seed, "epoch", epoch)).shuffle(order)
        return order


def _separate_recent(order: list[int], recent: Set[int], width: int) -> None:
    """Whatever is recent among the first `width` changes places with what is not, and not among the last `width`: an
    epoch's end stays as it was drawn, so that the next one knows it.
    """
    free = (place for place in range(width, len(order) - width) if order[place] not in recent)
    for place in range(width):
        if order[place] in recent:
            other = next(free)
            order[place], order[other] = order[other], order[place]


class SequentialOrder(Generic[RowT]):
    """The same order in every epoch."""

    def __init__(self, samples: Sequence[RowT]) -> None:
        if not samples:
            raise ValueError("there are no samples to draw from")
        self._samples = samples

    def take(self, start_position: int, count: int) -> list[RowT]:
        """The `count` samples that follow position `cursor`."""
        return [
            self._samples[position % len(self._samples)] for position in range(start_position, start_position + count)
        ]


class CachedOrder:
    """An order that reads no row twice for those who look ahead, and take again from there more rows or fewer."""

    def __init__(self, order: DataOrder) -> None:
        self._order = order
        self._start, self._rows = 0, list[DataRow]()

    def take(self, start_position: int, count: int) -> list[DataRow]:
        """The `count` rows that follow position `cursor`."""
        held = self._rows[start_position - self._start :] if start_position >= self._start else []
        missing = count - len(held)
        if missing > 0:
            held += self._order.take(start_position + len(held), missing)
        self._start, self._rows = start_position, held
        return held[:count]


def sort_by_column(samples: Sequence[Sample], column: str, *, descending: bool) -> list[Sample]:
    """Samples in the order of a number in their `meta`; equal ones as they were.

    Raises:
        UserError: a sample has no number there.
    """
    for sample in samples:
        value = sample.meta.get(column)
        if isinstance(value, bool) or not isinstance(value, int | float) or isnan(value):
            raise UserError(f"sample {sample.id}: meta has no number {column!r} to sort by, but {value!r}")
    return sorted(samples, key=lambda sample: float(sample.meta[column]), reverse=descending)
