"""JSON: a list of objects, or an object that holds such a list under `data`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mmrl.types import UserError
from mmrl_datasets.formats.jsonl import as_cells
from mmrl_datasets.formats.row import Row, short_repr

MAX_BYTES: Final = 512 << 20
"""Largest file. JSON is read as a whole, and its objects take several times the size of the file."""


def load_json(file: Path) -> object:
    """Return the content of a JSON file.

    Raises:
        UserError: there is no such file, or it is too large, or not JSON.
    """
    if not file.is_file():
        raise UserError(f"{file}: no such file; correct the path")
    if file.stat().st_size > MAX_BYTES:
        raise UserError(f"{file}: is larger than {MAX_BYTES >> 20} MiB; write it as JSON Lines, which is read in parts")
    try:
        content: object = json.loads(file.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: is not JSON in UTF-8 ({error})") from error
    return content


def read_rows(file: Path) -> Iterator[Row]:
    """Yield each item of the list.

    Raises:
        UserError: the file cannot be read (see `load_json`), or holds no list of rows.
    """
    content = load_json(file)
    items = content.get("data") if isinstance(content, dict) else content
    if not isinstance(items, list):
        raise UserError(f"{file}: must be a list of rows, or hold one under `data`; is {short_repr(content)}")
    for number, item in enumerate(items, start=1):
        yield Row(f"row-{number}", f"{file}: row {number}", as_cells(item))
