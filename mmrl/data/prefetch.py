"""Prefetching: worker processes open and encode the media of a step while the step before it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from mmrl.config.schema import DataConfig
from mmrl.data.order import DataOrder, DataRow
from mmrl.types import PromptTooLongError, RejectedRow, Sample, UserError
from mmrl.utils.worker_pool import WorkerPool

if TYPE_CHECKING:
    from mmrl.policy.encoder import EncodedPrompt
    from mmrl.policy.processor import PromptProcessor

_MAX_WARNINGS: Final = 5


class Prefetcher:
    """Takes samples from an order and encodes them; implements `protocols.SampleSource`.

    With workers, the rows of the next step are encoded while this one trains, as many as the largest request so far.
    Rows that the next step does not take wait for the one after it. Without workers, samples are encoded when they are
    taken, to the same bytes.
    """

    def __init__(
        self,
        order: DataOrder,
        processor: PromptProcessor,
        workers: WorkerPool[Sample, EncodedPrompt] | None,
        *,
        own_rows: Callable[[Sequence[DataRow]], Sequence[DataRow]],
        current_step: Callable[[], int],
        options: DataConfig,
        ahead: DataOrder | None = None,
        warn: Callable[[str], None],
    ) -> None:
        """Create a source. `processor` keeps the encoded prompts and, without `workers`, encodes them in this process.

        `own_rows` returns this rank's share of the rows of a round. `current_step` returns the step that is running,
        whose encoded prompts stay in memory. `options` say which rows are left out instead of ending the run; `warn`
        prints the first few. `ahead` gives the probable rows of the next step, which workers encode early. It is None
        if the next rows depend on the current step; workers then encode a step's rows when it begins.
        """
        self._order = order
        self._processor, self._workers, self._own_rows = processor, workers, own_rows
        self._options, self._warn = options, warn
        self._ahead, self._current_step = ahead, current_step
        self._num_dropped = 0
        self._in_flight: list[tuple[DataRow, Future[EncodedPrompt] | None]] = []
        self._max_count = 0

    def take(self, start_position: int, count: int) -> list[Sample]:
        """Return this rank's share of the samples at `count` positions from `start_position` on, without unusable ones.

        Positions span all ranks, so a run may continue with another number of them. The list may be empty:
        other ranks may have samples, or the round may consist of unfinished rollouts.

        Raises:
            UserError: a sample is not usable and may not be left out.
        """
        samples: list[Sample] = []
        encoded: list[EncodedPrompt] = []
        self._max_count = max(self._max_count, count)
        rows = _reject_repeated_ids(self._order.take(start_position, count))
        for row, future in self._schedule(rows):
            if isinstance(row, RejectedRow):
                remedy = "repair it, or leave such rows out with data.on_bad_sample=skip"
                self._drop_or_raise(UserError(f"row {row.id}: {row.reason}; {remedy}"))
                continue
            try:
                prompt = self._processor.encode(row) if future is None else future.result()
            except UserError as error:
                self._drop_or_raise(error)
                continue
            samples.append(row)
            encoded.append(prompt)
        # Keep these before the next step is scheduled, because it skips prompts that the processor already has.
        self._processor.retain(samples, encoded, step=self._current_step())
        if self._workers is not None and self._ahead is not None:
            self._in_flight = self._schedule(self._ahead.take(start_position + count, self._max_count))
        return samples

    def _schedule(self, rows: Sequence[DataRow]) -> list[tuple[DataRow, Future[EncodedPrompt] | None]]:
        """Return this rank's share of `rows`, each with the future of its encoding, or None if no worker encodes it."""
        # By identity: `CachedOrder` hands out the same objects again, and two rows may be equal.
        futures = {id(row): future for row, future in self._in_flight}
        scheduled = []
        for row in self._own_rows(rows):
            if id(row) in futures:
                future = futures[id(row)]
            elif self._workers is None or isinstance(row, RejectedRow) or self._processor.is_cached(row):
                future = None
            else:
                future = self._workers.submit(row)
            scheduled.append((row, future))
        return scheduled

    def _drop_or_raise(self, error: UserError) -> None:
        choice = self._options.on_bad_sample
        if isinstance(error, PromptTooLongError):
            choice = self._options.on_too_long
        if choice != "skip":
            raise error
        self._num_dropped += 1
        if self._num_dropped > _MAX_WARNINGS:
            return
        is_last = self._num_dropped == _MAX_WARNINGS
        note = "; from here on they are only counted, in data/dropped" if is_last else ""
        self._warn(f"left out: {error}{note}")


def _reject_repeated_ids(rows: Sequence[DataRow]) -> list[DataRow]:
    """Return the rows of all ranks, with a rejected row in place of each sample that has the id of another one."""
    parts_by_id: dict[str, tuple[object, ...]] = {}
    checked: list[DataRow] = []
    for row in rows:
        # In a supervised stage the same sample may come twice, at the border of two epochs.
        if isinstance(row, Sample) and parts_by_id.setdefault(row.id, row.parts) != row.parts:
            checked.append(RejectedRow(row.id, "another sample of the same step has this id, and ids must be unique"))
        else:
            checked.append(row)
    return checked
