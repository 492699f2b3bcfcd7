"""What stands between the order of samples and the loop: the media of a step are ready when the step begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, Generic, Protocol, TypeVar

from mmrl.data.order import DataOrder, DataRow
from mmrl.utils.worker_pool import WorkerPool
from mmrl.types import PromptTooLongError, RejectedRow, Sample, UserError

_MAX_WARNINGS: Final = 5
EncodedT = TypeVar("EncodedT")


class CachingEncoder(Protocol[EncodedT]):
    """Turns samples into what the model's forward needs of them, and keeps that."""

    def encode(self, sample: Sample) -> EncodedT:
        """The feed of a sample, from its text and media alone. Raises UserError naming the sample."""

    def get_cached(self, sample: Sample) -> EncodedT | None:
        """The feed of a sample, if it is kept."""

    def retain(self, samples: Sequence[Sample], encoded: Sequence[EncodedT]) -> None:
        """Keep the feeds of a step's samples until those of the next step are held."""


class Prefetcher(Generic[EncodedT]):
    """A source whose samples are processed when they are taken, and by `workers` one step before that: as many as a
    step has taken so far, at most. What the next step leaves of them is there for the one after it.

    An order that cannot be foreseen is taken from as it comes: workers do one step's samples at a time. Without workers
    it is done here and now, to the same bytes.
    """

    def __init__(
        self,
        order: DataOrder,
        encoder: CachingEncoder[EncodedT],
        workers: WorkerPool[Sample, EncodedT] | None,
        *,
        skip_unusable: bool,
        drop_too_long: bool = False,
        can_prefetch: bool = True,
        warn: Callable[[str], None],
    ) -> None:
        """With `skip`, what cannot be used is left out and `warn` hears of the first few; otherwise it ends the run.

        Whether too long a prompt ends it, `drop_long` says.
        """
        self._order, self._encoder, self._workers = order, encoder, workers
        self._skip_unusable, self._drop_too_long, self._warn, self._num_dropped = skip_unusable, drop_too_long, warn, 0
        self._can_prefetch = can_prefetch
        self._in_flight: list[_ScheduledRow[EncodedT]] = []
        self._max_count = 0

    def take(self, start_position: int, count: int) -> list[Sample]:
        """The samples at the `count` positions from `cursor` on; unusable ones are left out.

        Raises:
            UserError: not one is usable, or an unusable one is to stop the run.
        """
        samples: list[Sample] = []
        feeds: list[EncodedT] = []
        coming = self._schedule(start_position, count)
        self._max_count = max(self._max_count, count)
        for row, future in coming:
            try:
                sample = _check_row(row, samples)
                feeds.append(self._wait_or_encode(sample, future))
                samples.append(sample)
            except UserError as error:
                self._drop_or_raise(error)
        if not samples and len(coming) == count:  # of a rank's part of them, it is the ranks that count
            raise UserError(f"data.train: not one of the {count} samples from position {start_position} on can be used")
        self._encoder.retain(samples, feeds)
        if self._workers is not None and self._can_prefetch:
            self._in_flight = self._schedule(start_position + count, self._max_count)
        return samples

    def _schedule(self, cursor: int, count: int) -> list[_ScheduledRow[EncodedT]]:
        """The rows of a step; those that nobody works at yet are begun."""
        begun = {id(row): future for row, future in self._in_flight}
        rows = self._order.take(cursor, count)
        return [(row, begun[id(row)] if id(row) in begun else self._submit(row)) for row in rows]

    def _submit(self, row: DataRow) -> Future[EncodedT] | None:
        if self._workers is None or isinstance(row, RejectedRow) or self._encoder.get_cached(row) is not None:
            return None
        return self._workers.submit(row)

    def _wait_or_encode(self, sample: Sample, future: Future[EncodedT] | None) -> EncodedT:
        if future is not None:
            return future.result()
        cached = self._encoder.get_cached(sample)
        return self._encoder.encode(sample) if cached is None else cached

    def _drop_or_raise(self, error: UserError) -> None:
        if not (self._drop_too_long if isinstance(error, PromptTooLongError) else self._skip_unusable):
            raise error
        self._num_dropped += 1
        if self._num_dropped <= _MAX_WARNINGS:
            rest = "; from here on they are only counted, in data/dropped" if self._num_dropped == _MAX_WARNINGS else ""
            self._warn(f"left out: {error}{rest}")


_ScheduledRow = tuple[DataRow, Future[EncodedT] | None]


def _check_row(row: DataRow, earlier: Sequence[Sample]) -> Sample:
    """The row as a sample that may stand in one step with those before it."""
    if isinstance(row, RejectedRow):
        raise UserError(f"row {row.id}: {row.reason}; repair it, or leave such rows out with data.bad_sample=skip")
    if any(sample.id == row.id and sample.parts != row.parts for sample in earlier):
        raise UserError(f"sample {row.id}: another sample of the same step has this id; ids must be unique")
    return row
