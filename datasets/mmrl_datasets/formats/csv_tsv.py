"""CSV and TSV tables with a header, in UTF-8, quoted as spreadsheets and pandas do."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mmrl.types import UserError
from mmrl_datasets.formats.row import BadRowError, Cells, Row

MAX_CELL_CHARS: Final = 64 << 20


def read_rows(file: Path) -> Iterator[Row]:
    """Yield each record that is not blank. All cells are text, and the name gives the line on which a record ends.

    Raises:
        UserError: there is no header, or it names a column twice, or it is not UTF-8.
    """
    # The limit belongs to the whole process. Images in base64 exceed Python's default of 128 KiB.
    csv.field_size_limit(MAX_CELL_CHARS)
    # Bytes that are not UTF-8 become lone surrogates, so that they spoil their own record instead of the whole file.
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
    if not all(map(_is_utf8, header)):
        raise UserError(f"{file}: the header is not UTF-8; save the file as UTF-8")
    if not any(header) or len(set(header)) < len(header):
        raise UserError(f"{file}: the first line must name the columns, each once; it is {header}")
    return header


def _parse_record(header: list[str], record: list[str]) -> Cells | BadRowError:
    if len(record) != len(header):
        return BadRowError(f"has {len(record)} cells, the header has {len(header)}")
    if not all(map(_is_utf8, record)):
        return BadRowError("is not UTF-8")
    return dict(zip(header, record, strict=True))


def _is_utf8(text: str) -> bool:
    """Return False if the text holds a surrogate that stands for a byte that was not UTF-8."""
    return text.isascii() or not any("\udc80" <= letter <= "\udcff" for letter in text)
