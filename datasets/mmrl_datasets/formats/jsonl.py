"""JSON Lines: one object per line, in UTF-8."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from mmrl.types import UserError
from mmrl_datasets.formats.row import BadRowError, Cells, Row, short_repr

MAX_LINE_BYTES: Final = 64 << 20
"""A longer line is rejected, and never held in memory as a whole."""
UTF16_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")


def read_rows(file: Path) -> Iterator[Row]:
    """Yield each line that is not blank, one line in memory at a time.

    Raises:
        UserError: the file is UTF-16.
    """
    with file.open("rb") as content:
        if content.read(2) in UTF16_BOMS:
            raise UserError(f"{file}: is UTF-16; save it as UTF-8")
        content.seek(0)
        for number, line in enumerate(_read_lines(content), start=1):
            if line.strip():
                yield Row(f"line-{number}", f"{file}:{number}", _parse_line(line))


def as_cells(value: object) -> Cells | BadRowError:
    """Return a JSON value as the cells of a row, or the error that it is no object."""
    if isinstance(value, dict):
        return value
    return BadRowError(f"must be an object of columns, is {short_repr(value)}")


def _read_lines(content: BinaryIO) -> Iterator[bytes]:
    """Yield lines. A line over the limit is cut one byte beyond it, and the rest is skipped in pieces."""
    for line in iter(partial(content.readline, MAX_LINE_BYTES + 1), b""):
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = content.readline(MAX_LINE_BYTES + 1)
        yield line


def _parse_line(line: bytes) -> Cells | BadRowError:
    if len(line) > MAX_LINE_BYTES:
        return BadRowError(f"longer than {MAX_LINE_BYTES >> 20} MiB; keep images in files of their own")
    try:
        return as_cells(json.loads(line.decode("utf-8-sig")))
    except (ValueError, RecursionError) as error:
        return BadRowError(f"not a line of JSON ({error})")
