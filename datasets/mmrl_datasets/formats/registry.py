"""Choose the format of a file, a folder or a hub address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mmrl.types import UserError
from mmrl_datasets.formats import csv_tsv, hugging_face, json_file, jsonl, parquet
from mmrl_datasets.formats.row import Row

FILE_EXTENSIONS: Final = (".jsonl", ".ndjson", ".json", ".tsv", ".csv", ".parquet")


def open_rows(base: Path, path: str, split: str) -> Iterator[Row]:
    """Yield the rows of a file, a folder or `hf://owner/name`. Relative paths start from `base`.

    `split` chooses a part of folders and hub datasets; a file has one split only.

    Raises:
        UserError: there is no such file, or its format is unknown; while rows are read, the file is damaged.
    """
    if path.startswith(hugging_face.HUB_SCHEME):
        return hugging_face.read_from_hub(path, split)
    file = base / path
    if file.is_dir():
        if hugging_face.is_saved_dataset(file):
            return hugging_face.read_from_disk(file, split)
        return parquet.read_rows(parquet.find_shards(file, split))
    if not (file.is_file() and os.access(file, os.R_OK)):
        raise UserError(f"{file}: no such file that can be read; a relative path starts from {base}")
    return _read_file(file)


def _read_file(file: Path) -> Iterator[Row]:
    match file.suffix.lower():
        case ".jsonl" | ".ndjson":
            return jsonl.read_rows(file)
        case ".json":
            return json_file.read_rows(file)
        case ".tsv" | ".csv":
            return csv_tsv.read_rows(file)
        case ".parquet":
            return parquet.read_rows([file])
        case _:
            raise UserError(f"{file}: the format is unknown; the name must end in one of {', '.join(FILE_EXTENSIONS)}")
