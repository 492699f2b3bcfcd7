"""Append-only files of metrics, one JSON object a line.

metrics.jsonl holds only values that follow from the config and its seed, so a run that was killed and resumed ends with
the same bytes as one that was not. Wall-clock values go to timings.jsonl, where a repeated step stands twice.
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


class MetricsFile:
    """A file to which one JSON object a line is appended. A value that is not finite is written as null."""

    def __init__(self, path: Path) -> None:
        """Open the file, and cut off a last line that a killed run left incomplete."""
        self._path = path
        with report_write_errors(path):
            # Unbuffered: a killed run loses nothing that `append` has returned from.
            self._file = path.open("a+b", buffering=0)
            self._file.truncate(self._find_end_of_last_line())

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line, with the keys in the order given.

        Raises:
            UserError: the disk is full or the file cannot be written.
        """
        remaining = memoryview(json_line(record).encode("utf-8", errors="backslashreplace"))
        with report_write_errors(self._path):
            # An unbuffered write may take only a part of the bytes.
            while remaining:
                remaining = remaining[self._file.write(remaining) :]

    def position(self) -> int:
        """Return the size of the file in bytes; a checkpoint records it."""
        return self._file.seek(0, os.SEEK_END)

    def sync(self) -> None:
        """Wait until everything written is on disk; called before a checkpoint that records the position is."""
        with report_write_errors(self._path):
            os.fsync(self._file.fileno())

    def truncate(self, position: int) -> None:
        """Delete everything after byte `position`, where a resumed run continues.

        Raises:
            UserError: no line of the file ends there.
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
        """Close the file; nothing can be appended then."""
        self._file.close()

    def _find_end_of_last_line(self) -> int:
        size = self._file.seek(0, os.SEEK_END)
        start = max(0, size - _MAX_LINE_BYTES)
        self._file.seek(start)
        return start + self._file.read(size - start).rfind(b"\n") + 1


def read_records(path: Path, end: int) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics file up to byte `end`."""
    with path.open("rb") as file:
        while file.tell() < end:
            yield json.loads(file.readline())
