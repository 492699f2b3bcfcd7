"""Parquet: one file, or a folder of them as Hugging Face exports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from mmrl.types import UserError
from mmrl_datasets.formats.row import Cells, Row, did_you_mean

BATCH_ROWS: Final = 64  # with pictures inside, some megabytes
BUFFER_BYTES: Final = 1 << 20
SHARD_NAME: Final = re.compile(r"(.+)-\d{5}-of-\d{5}\.parquet")


def find_shards(folder: Path, split: str) -> list[Path]:
    """The Parquet files under a folder; where names say `<split>-00000-of-00001.parquet`, those of the split.

    Raises:
        UserError: there are none, or none of that split.
    """
    files = sorted(folder.rglob("*.parquet"))
    splits = {file: match.group(1) for file in files if (match := SHARD_NAME.fullmatch(file.name))}
    if splits and split not in splits.values():
        known = sorted(set(splits.values()))
        raise UserError(f"{folder}: has no split {split!r}{did_you_mean(split, known)}; there are {', '.join(known)}")
    if not files:
        raise UserError(f"{folder}: holds neither Parquet files nor a dataset saved to disk")
    return [file for file in files if splits.get(file) == split] if splits else files


def read_rows(files: Sequence[Path]) -> Iterator[Row]:
    """Each row, a batch at a time; `row-7` counts through all files, the place within one.

    Raises:
        UserError: a file is not Parquet, or damaged.
    """
    number = 0
    for file in files:
        for inside, cells in enumerate(_iter_cells(file), start=1):
            number += 1
            yield Row(f"row-{number}", f"{file}: row {inside}", cells)


def write_rows(file: Path, rows: Sequence[Cells]) -> None:
    """Write rows; one that lacks a column of another has null there.

    Raises:
        UserError: a column holds values of several types.
    """
    import pyarrow
    from pyarrow.parquet import write_table

    names = dict.fromkeys(name for row in rows for name in row)
    try:
        write_table(pyarrow.table({name: [row.get(name) for row in rows] for name in names}), file)
    except pyarrow.ArrowException as error:
        raise UserError(f"{file}: Parquet cannot hold the rows ({error}); write JSON Lines instead") from error


def _iter_cells(file: Path) -> Iterator[Cells]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    done = 0
    try:
        # Without these two Arrow keeps all it has read until the file is closed.
        with ParquetFile(file, pre_buffer=False, buffer_size=BUFFER_BYTES) as content:
            for batch in content.iter_batches(BATCH_ROWS):
                yield from batch.to_pylist()
                done += batch.num_rows
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as Parquet beyond row {done} ({error})") from error
