"""Text tables with a header: tab or comma separated, quoted as spreadsheets and pandas do, UTF-8."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mmrl.types import UserError
from mmrl_datasets.formats.row import BadRowError, Cells, Row

MAX_CELL_CHARS: Final = 64 << 20


def read_rows(file: Path) -> Iterator[Row]:
    """Each record, all cells text; a record that is not blank is named by the line it ends on.

    Raises:
        UserError: there is no header, or one that names a column twice or is not UTF-8.
    """
    csv.field_size_limit(MAX_CELL_CHARS)  # of the whole process; pictures in base64 exceed what Python sets
    # Bytes that are no UTF-8 become lone surrogates, which spoil their own record instead of the whole file.
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        records = csv.reader(lines, delimiter="," if file.suffix.lower() == ".csv" else "\t", strict=True)
        header = _read_header(file, records)
        while True:
            try:
                record = next(records)
            except StopIteration:
                return
            except csv.Error as error:
                cells: Cells | BadRowError = BadRowError(f"not a record of a table ({error})")
            else:
                if not record:
                    continue
                cells = _parse_record(header, record)
            yield Row(f"line-{records.line_num}", f"{file}:{records.line_num}", cells)


def _read_header(file: Path, records: Iterator[list[str]]) -> list[str]:
    try:
        header = next(records, [])
    except csv.Error as error:
        raise UserError(f"{file}: the header cannot be read ({error})") from error
    if not all(_is_utf8(name) for name in header):
        raise UserError(f"{file}: the header is not UTF-8; save the file as UTF-8")
    if not any(header) or len(set(header)) < len(header):
        raise UserError(f"{file}: the first line must name the columns, each once; it is {header}")
    return header


def _parse_record(header: list[str], record: list[str]) -> Cells | BadRowError:
    if len(record) != len(header):
        return BadRowError(f"has {len(record)} cells, the header has {len(header)}")
    if not all(_is_utf8(cell) for cell in record):
        return BadRowError("is not UTF-8")
    return dict(zip(header, record, strict=True))


def _is_utf8(text: str) -> bool:
    return text.isascii() or not any("\udc80" <= letter <= "\udcff" for letter in text)
