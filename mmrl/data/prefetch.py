"""What stands between the order of samples and the loop: the media of a step are ready when the step begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, Generic, Protocol, TypeVar

from mmrl.data.order import Order, Row
from mmrl.media.media_workers import Workers
from mmrl.types import Reject, Sample, TooLongError, UserError

_TOLD: Final = 5
FeedT = TypeVar("FeedT")


class Preparer(Protocol[FeedT]):
    """Turns samples into what the model's forward needs of them, and keeps that."""

    def process(self, sample: Sample) -> FeedT:
        """The feed of a sample, from its text and media alone. Raises UserError naming the sample."""

    def cached(self, sample: Sample) -> FeedT | None:
        """The feed of a sample, if it is kept."""

    def hold(self, samples: Sequence[Sample], feeds: Sequence[FeedT]) -> None:
        """Keep the feeds of a step's samples until those of the next step are held."""


class Ahead(Generic[FeedT]):
    """A source whose samples are processed when they are taken, and by `workers` one step before that: as many as a
    step has taken so far, at most. What the next step leaves of them is there for the one after it.

    An order that cannot be foreseen is taken from as it comes: workers do one step's samples at a time. Without workers
    it is done here and now, to the same bytes.
    """

    def __init__(
        self,
        order: Order,
        preparer: Preparer[FeedT],
        workers: Workers[Sample, FeedT] | None,
        *,
        skip: bool,
        drop_long: bool = False,
        foresees: bool = True,
        warn: Callable[[str], None],
    ) -> None:
        """With `skip`, what cannot be used is left out and `warn` hears of the first few; otherwise it ends the run.

        Whether too long a prompt ends it, `drop_long` says.
        """
        self._order, self._preparer, self._workers = order, preparer, workers
        self._skip, self._drop_long, self._warn, self._skipped = skip, drop_long, warn, 0
        self._foresees = foresees
        self._begun: list[_Coming[FeedT]] = []
        self._most = 0

    def take(self, cursor: int, count: int) -> list[Sample]:
        """The samples at the `count` positions from `cursor` on; unusable ones are left out.

        Raises:
            UserError: not one is usable, or an unusable one is to stop the run.
        """
        samples: list[Sample] = []
        feeds: list[FeedT] = []
        coming = self._coming(cursor, count)
        self._most = max(self._most, count)
        for row, future in coming:
            try:
                sample = _sample(row, samples)
                feeds.append(self._feed(sample, future))
                samples.append(sample)
            except UserError as error:
                self._leave_out(error)
        if not samples and len(coming) == count:  # of a rank's part of them, it is the ranks that count
            raise UserError(f"data.train: not one of the {count} samples from position {cursor} on can be used")
        self._preparer.hold(samples, feeds)
        if self._workers is not None and self._foresees:
            self._begun = self._coming(cursor + count, self._most)
        return samples

    def _coming(self, cursor: int, count: int) -> list[_Coming[FeedT]]:
        """The rows of a step; those that nobody works at yet are begun."""
        begun = {id(row): future for row, future in self._begun}
        rows = self._order.take(cursor, count)
        return [(row, begun[id(row)] if id(row) in begun else self._submitted(row)) for row in rows]

    def _submitted(self, row: Row) -> Future[FeedT] | None:
        if self._workers is None or isinstance(row, Reject) or self._preparer.cached(row) is not None:
            return None
        return self._workers.submit(row)

    def _feed(self, sample: Sample, future: Future[FeedT] | None) -> FeedT:
        if future is not None:
            return future.result()
        cached = self._preparer.cached(sample)
        return self._preparer.process(sample) if cached is None else cached

    def _leave_out(self, error: UserError) -> None:
        if not (self._drop_long if isinstance(error, TooLongError) else self._skip):
            raise error
        self._skipped += 1
        if self._skipped <= _TOLD:
            rest = "; from here on they are only counted, in data/skipped" if self._skipped == _TOLD else ""
            self._warn(f"left out: {error}{rest}")


_Coming = tuple[Row, Future[FeedT] | None]


def _sample(row: Row, before: Sequence[Sample]) -> Sample:
    """The row as a sample that may stand in one step with those before it."""
    if isinstance(row, Reject):
        raise UserError(f"row {row.id}: {row.reason}; repair it, or leave such rows out with data.bad_sample=skip")
    if any(sample.id == row.id and sample.parts != row.parts for sample in before):
        raise UserError(f"sample {row.id}: another sample of the same step has this id; ids must be unique")
    return row
