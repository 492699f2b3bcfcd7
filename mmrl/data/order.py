"""Data orders: which sample comes at which position. Seeded and endless.

Training keeps one number, the position of the next sample. An order maps positions to rows without a memory of what was
taken before, so that a resumed run goes on exactly and workers can look ahead.
"""

from __future__ import annotations

import random
from collections.abc import Sequence, Set
from math import isnan
from typing import Generic, Protocol, TypeVar

from mmrl.types import RejectedRow, Sample, UserError
from mmrl.utils.seeds import derive_seed

DataRow = Sample | RejectedRow
"""A row of a data source: a sample, or a row that could not be turned into one."""
RowT = TypeVar("RowT", bound=DataRow)


class DataOrder(Protocol):
    """An endless order of rows. A rejected row has a position like any other, so positions never shift."""

    def take(self, start_position: int, count: int) -> Sequence[DataRow]:
        """Return the `count` rows from `start_position` on."""


class ShuffledOrder(Generic[RowT]):
    """Takes every sample once per epoch, in a new random order each time."""

    def __init__(self, samples: Sequence[RowT], seed: int, *, min_gap: int = 0) -> None:
        """Create an order.

        Args:
            samples: at least one.
            seed: of all epochs.
            min_gap: positions between the last visit of a sample in one epoch and its first in the next; reduced to a
                third of the samples if there are few.

        Raises:
            ValueError: there are no samples.
        """
        if not samples:
            raise ValueError("there are no samples to draw from")
        self._samples = samples
        self._seed = seed
        self._min_gap = min(min_gap, len(samples) // 3)
        self._cached_epoch: tuple[int, list[int]] = (-1, [])

    def take(self, start_position: int, count: int) -> list[RowT]:
        """Return the `count` samples from `start_position` on."""
        taken: list[RowT] = []
        while len(taken) < count:
            epoch, start = divmod(start_position + len(taken), len(self._samples))
            end = start + count - len(taken)
            taken += [self._samples[index] for index in self._epoch_order(epoch)[start:end]]
        return taken

    def _epoch_order(self, epoch: int) -> list[int]:
        """Return the indices of the samples in the order of one epoch."""
        if self._cached_epoch[0] != epoch:
            order = self._permutation(epoch)
            if epoch and self._min_gap:
                recent = set(self._permutation(epoch - 1)[-self._min_gap :])
                _move_recent_back(order, recent, self._min_gap)
            self._cached_epoch = (epoch, order)
        return self._cached_epoch[1]

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(len(self._samples)))
        random.Random(derive_seed(self._seed, "epoch", epoch)).shuffle(order)
        return order


class SequentialOrder(Generic[RowT]):
    """Takes the samples in the same order in every epoch."""

    def __init__(self, samples: Sequence[RowT]) -> None:
        """Create an order of at least one sample; raises ValueError if there are none."""
        if not samples:
            raise ValueError("there are no samples to draw from")
        self._samples = samples

    def take(self, start_position: int, count: int) -> list[RowT]:
        """Return the `count` samples from `start_position` on."""
        positions = range(start_position, start_position + count)
        return [self._samples[position % len(self._samples)] for position in positions]


class CachedOrder:
    """Keeps the rows of the last take, so that an order is not read twice by a caller that looks ahead.

    A prefetching caller takes the rows of the next step early, and takes them again, more or fewer, when it begins.
    """

    def __init__(self, order: DataOrder) -> None:
        self._order = order
        self._start, self._rows = 0, list[DataRow]()

    def take(self, start_position: int, count: int) -> list[DataRow]:
        """Return the `count` rows from `start_position` on."""
        held = self._rows[start_position - self._start :] if start_position >= self._start else []
        missing = count - len(held)
        if missing > 0:
            held += self._order.take(start_position + len(held), missing)
        self._start, self._rows = start_position, held
        return held[:count]


def sort_by_column(samples: Sequence[Sample], column: str, *, descending: bool) -> list[Sample]:
    """Return the samples sorted by a number in their `meta`; equal ones keep their order.

    Raises:
        UserError: a sample has no number there.
    """
    for sample in samples:
        value = sample.meta.get(column)
        if isinstance(value, bool) or not isinstance(value, int | float) or isnan(value):
            raise UserError(f"sample {sample.id}: meta has no number {column!r} to sort by, but {value!r}")

    def column_value(sample: Sample) -> float:
        return float(sample.meta[column])

    return sorted(samples, key=column_value, reverse=descending)


def _move_recent_back(order: list[int], recent: Set[int], width: int) -> None:
    """Swap recent samples among the first `width` with others from the middle.

    The last `width` stay as they were drawn, because the next epoch recomputes them from its seed to know what is
    recent.
    """
    middle = range(width, len(order) - width)
    free = (position for position in middle if order[position] not in recent)
    for position in range(width):
        if order[position] in recent:
            other = next(free)
            order[position], order[other] = order[other], order[position]
