"""Numbers of a run as JSON lines.

metrics.jsonl holds only what a seed decides, so a run that was killed and resumed ends with the same bytes as one that
was not. Wall-clock numbers go to timings.jsonl, where steps that were done twice stand twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmrl.types import UserError
from mmrl.utils.files import json_line, report_write_errors

_MAX_LINE_BYTES = 1 << 20


def read_records(path: Path, end: int) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file up to byte `end`, from the first."""
    with path.open("rb") as file:
        while file.tell() < end:
            yield json.loads(file.readline())


class MetricsFile:
    """An append-only file of one JSON object per line. A number that is not finite is written as null."""

    def __init__(self, path: Path) -> None:
        """Open the file, cutting a last line that a killed run left unfinished."""
        self._path = path
        with report_write_errors(path):
            self._file = path.open("a+b", buffering=0)
            self._file.truncate(self._find_end_of_last_line())

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line, keys in the order given.

        Raises:
            UserError: the disk is full or the file cannot be written.
        """
        rest = memoryview(json_line(record).encode("utf-8", errors="backslashreplace"))
        with report_write_errors(self._path):
            while rest:
                rest = rest[self._file.write(rest) :]

    def position(self) -> int:
        """Bytes written so far: what a checkpoint remembers."""
        return self._file.seek(0, os.SEEK_END)

    def sync(self) -> None:
        """Wait until all that was written is on disk, before the checkpoint that remembers it is."""
        with report_write_errors(self._path):
            os.fsync(self._file.fileno())

    def truncate(self, position: int) -> None:
        """Forget everything after `position`, as a run resumed from a checkpoint must.

        Raises:
            UserError: the file does not have a line that ends there.
        """
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, position - 1))
        if position > size or (position and self._file.read(1) != b"\n"):
            raise UserError(
                f"{self._path} was changed since the checkpoint: no line ends at byte {position} of {size}; "
                "restore the file, or choose another run directory"
            )
        with report_write_errors(self._path):
            self._file.truncate(position)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _find_end_of_last_line(self) -> int:
        size = self._file.seek(0, os.SEEK_END)
        start = max(0, size - _MAX_LINE_BYTES)
        self._file.seek(start)
        return start + self._file.read(size - start).rfind(b"\n") + 1
