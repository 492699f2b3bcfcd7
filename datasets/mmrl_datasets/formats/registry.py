"""Which format a path is in: the one place that knows them all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from mmrl.types import UserError
from mmrl_datasets.formats import csv_tsv, hugging_face, json_file, jsonl, parquet
from mmrl_datasets.formats.row import Row

FORMAT_READERS: Final[Mapping[str, Callable[[Path], Iterator[Row]]]] = {
    ".jsonl": jsonl.read_rows,
    ".ndjson": jsonl.read_rows,
    ".json": json_file.read_rows,
    ".tsv": csv_tsv.read_rows,
    ".csv": csv_tsv.read_rows,
    ".parquet": lambda file: parquet.read_rows([file]),
}


def open_rows(base: Path, path: str, split: str) -> Iterator[Row]:
    """The rows of a file or folder relative to `base`, or of `hf://owner/name`; only folders and the hub know splits.

    Raises:
        UserError: there is no such file, or none of a known format; later, what the format finds wrong.
    """
    if path.startswith(hugging_face.HUB_SCHEME):
        return hugging_face.read_from_hub(path, split)
    file = base / path
    if file.is_dir():
        saved = hugging_face.is_saved_dataset(file)
        return (
            hugging_face.read_from_disk(file, split) if saved else parquet.read_rows(parquet.find_shards(file, split))
        )
    if not (file.is_file() and os.access(file, os.R_OK)):
        raise UserError(f"{file}: no such file that can be read; a relative path starts from {base}")
    if file.suffix.lower() not in FORMAT_READERS:
        raise UserError(f"{file}: the format is known by the name's ending; there are {', '.join(FORMAT_READERS)}")
    return FORMAT_READERS[file.suffix.lower()](file)
