"""Parquet: one file, or a folder of shards as Hugging Face exports them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from mmrl.types import UserError
from mmrl_datasets.formats.row import Cells, Row, did_you_mean

BATCH_ROWS: Final = 64
"""Rows read at once: some megabytes where they hold images."""
BUFFER_BYTES: Final = 1 << 20
SHARD_NAME: Final = re.compile(r"(.+)-\d{5}-of-\d{5}\.parquet")


def find_shards(folder: Path, split: str) -> list[Path]:
    """Return the Parquet files under a folder, sorted by path.

    If some are named `<split>-00000-of-00001.parquet`, only those of the split are returned.

    Raises:
        UserError: there are none, or none of that split.
    """
    files = sorted(folder.rglob("*.parquet"))
    split_of_file = {}
    for file in files:
        match = SHARD_NAME.fullmatch(file.name)
        if match:
            split_of_file[file] = match.group(1)
    if split_of_file and split not in split_of_file.values():
        known = sorted(set(split_of_file.values()))
        raise UserError(f"{folder}: has no split {split!r}{did_you_mean(split, known)}; there are {', '.join(known)}")
    if not files:
        raise UserError(f"{folder}: holds neither Parquet files nor a dataset saved to disk")
    if not split_of_file:
        return files
    return [file for file in files if split_of_file.get(file) == split]


def read_rows(files: Sequence[Path]) -> Iterator[Row]:
    """Yield each row, one batch in memory at a time.

    The name `row-7` counts through all files, the location within one file.

    Raises:
        UserError: a file is not Parquet, or damaged.
    """
    total = 0
    for file in files:
        for number_in_file, cells in enumerate(_iter_cells(file), start=1):
            total += 1
            yield Row(f"row-{total}", f"{file}: row {number_in_file}", cells)


def write_rows(file: Path, rows: Sequence[Cells]) -> None:
    """Write rows to a file. A row that lacks a column of another row has null in it.

    Raises:
        UserError: a column holds values of several types.
    """
    import pyarrow
    from pyarrow.parquet import write_table

    # A dict keeps the order in which the columns come up first.
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    try:
        columns = {}
        for name in names:
            columns[name] = [row.get(name) for row in rows]
        write_table(pyarrow.table(columns), file)
    except pyarrow.ArrowException as error:
        raise UserError(f"{file}: Parquet cannot hold the rows ({error}); write JSON Lines instead") from error


def _iter_cells(file: Path) -> Iterator[Cells]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    rows_read = 0
    try:
        # By default Arrow reads ahead and keeps all that it has read until the file is closed.
        with ParquetFile(file, pre_buffer=False, buffer_size=BUFFER_BYTES) as content:
            for batch in content.iter_batches(BATCH_ROWS):
                yield from batch.to_pylist()
                rows_read += batch.num_rows
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as Parquet beyond row {rows_read} ({error})") from error
