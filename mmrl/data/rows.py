"""Reads a data source of the config: loads and calls its function, then names and filters the rows that it yields.

`mmrl_datasets` has the functions that come with mmrl; each yields samples, and a `RejectedRow` for a row that cannot
become a sample. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import isfinite
from pathlib import Path
from random import Random

from mmrl.config.schema import DataConfig, DataSourceConfig
from mmrl.types import DatasetContext, RejectedRow, Sample, UserError
from mmrl.utils.plugins import errors_about_call, load_plugin
from mmrl.utils.seeds import derive_seed

DatasetFunction = Callable[[DatasetContext], Iterable[Sample | RejectedRow]]
"""Yields the rows of a data source; its options are bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRows:
    """Rows of a split: as its sources give them, or without the samples whose images cannot be opened."""

    samples: Sequence[Sample]
    rejected: Sequence[RejectedRow]  # rows that make no sample
    source_indices: Mapping[str, int]  # id of a row → index of its source
    row_counts: Sequence[int]  # rows of each source that its `row_filter` keeps


def find_row_limit(data: DataConfig, split: str) -> int | None:
    """Return how many rows of each source of a split are read before training; None for all.

    Of a streamed source, which may have no end, these are as many rows as training will hold at once.
    """
    return data.streaming.shuffle_buffer_size if data.streaming and split == "train" else None


def load_dataset_function(source: DataSourceConfig, base_dir: Path) -> DatasetFunction:
    """Load the function of a data source, with its options bound; nothing is read yet.

    Raises:
        UserError: `fn` is not a function, or does not take these options.
    """
    return load_plugin(source.fn, base_dir, source.args, role="data source", parameters=("context",))


def read_source(
    source: DataSourceConfig, dataset_function: DatasetFunction, context: DatasetContext, split: str
) -> Iterator[Sample | RejectedRow]:
    """Call the dataset function of a source and yield its rows of a split, with the source's name before their ids.

    Raises:
        UserError: the function cannot read its data, or yields something else.
    """
    with errors_about_call(source.fn, source.args):
        rows = dataset_function(context)
        if not isinstance(rows, Iterable):
            raise UserError(f"data source {source.fn!r} returned {rows!r:.80}; let it yield samples, or return them")
        for row in rows:
            if not isinstance(row, Sample | RejectedRow):
                raise UserError(f"data source {source.fn!r} yielded {row!r:.80}, neither a Sample nor a RejectedRow")
            if not source.name:
                named = row
            elif isinstance(row, RejectedRow):
                named = row._replace(id=f"{source.name}/{row.id}")
            else:
                named = replace(row, id=f"{source.name}/{row.id}")
            share = source.validation_share
            is_held_out = share > 0.0 and Random(derive_seed("validation share", named.id)).random() < share
            if not share or is_held_out == (split == "validation"):
                yield named


def read_filtered_source(
    source: DataSourceConfig, base_dir: Path, context: DatasetContext, split: str, *, limit: int | None = None
) -> Iterator[Sample | RejectedRow]:
    """Load the function of a source, and yield those of the first `limit` rows of a split that its `row_filter` takes.

    Raises:
        UserError: as `load_dataset_function`, `read_source` and `passes_row_filter`.
    """
    for row in islice(read_source(source, load_dataset_function(source, base_dir), context, split), limit):
        if passes_row_filter(row, source):
            yield row


def passes_row_filter(row: Sample | RejectedRow, source: DataSourceConfig) -> bool:
    """Return True if the source's `row_filter` takes a row. A rejected row passes, since it is reported elsewhere.

    Raises:
        UserError: a sample has no number in the filter's column.
    """
    row_filter = source.row_filter
    if row_filter is None or isinstance(row, RejectedRow):
        return True
    value = row.meta.get(row_filter.column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise UserError(
            f"data source {source.fn!r}: row_filter: sample {row.id} has no number in column {row_filter.column!r} of "
            f"its meta ({value!r}); there is {', '.join(map(str, row.meta)) or 'nothing'}"
        )
    above_low = row_filter.low is None or value >= row_filter.low
    below_high = row_filter.high is None or value <= row_filter.high
    return above_low and below_high


def separate_rejected(rows: Iterable[Sample | RejectedRow]) -> tuple[list[Sample], list[RejectedRow]]:
    """Return samples and rejected rows apart, each in order."""
    all_rows = list(rows)
    samples = [row for row in all_rows if isinstance(row, Sample)]
    return samples, [row for row in all_rows if isinstance(row, RejectedRow)]
