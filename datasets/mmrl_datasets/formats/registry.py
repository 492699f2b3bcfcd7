"""Which format a path is in: the one place that knows them all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from mmrl.types import UserError
from mmrl_datasets.formats import csv_tsv, hugging_face, json_file, jsonl, parquet
from mmrl_datasets.formats.row import Row

READERS: Final[Mapping[str, Callable[[Path], Iterator[Row]]]] = {
    ".jsonl": jsonl.read,
    ".ndjson": jsonl.read,
    ".json": json_file.read,
    ".tsv": csv_tsv.read,
    ".csv": csv_tsv.read,
    ".parquet": lambda file: parquet.read([file]),
}


def open_rows(base: Path, path: str, split: str) -> Iterator[Row]:
    """The rows of a file or folder relative to `base`, or of `hf://owner/name`; only folders and the hub know splits.

    Raises:
        UserError: there is no such file, or none of a known format; later, what the format finds wrong.
    """
    if path.startswith(hugging_face.SCHEME):
        return hugging_face.from_hub(path, split)
    file = base / path
    if file.is_dir():
        saved = hugging_face.is_saved(file)
        return hugging_face.from_disk(file, split) if saved else parquet.read(parquet.shards(file, split))
    if not (file.is_file() and os.access(file, os.R_OK)):
        raise UserError(f"{file}: no such file that can be read; a relative path starts from {base}")
    if file.suffix.lower() not in READERS:
        raise UserError(f"{file}: the format is known by the name's ending; there are {', '.join(READERS)}")
    return READERS[file.suffix.lower()](file)
