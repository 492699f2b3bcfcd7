"""Which pictures a run has opened before, and their sizes: resumed, it opens only what is new or was touched since."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from mmrl.types import ImageRef, Size
from mmrl.utils.files import report_write_errors, write_atomically


class _OpenedFile(NamedTuple):
    """A picture as it was opened: the digest it was referenced by, the file's bytes and date, and its extent."""

    sha256: str
    num_bytes: int
    mtime_ns: int
    width: int
    height: int


class OpenedMediaIndex:
    """A file with an entry for every picture that was opened and found good. Training checks each digest anyway."""

    def __init__(self, path: Path) -> None:
        """Read the file; one that is missing or damaged knows nothing, and everything is opened again."""
        self._path = path
        try:
            found = json.loads(path.read_text())
            self._entries = {name: _OpenedFile(*entry) for name, entry in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            self._entries = {}

    def known_sizes(self, refs: Iterable[ImageRef]) -> dict[ImageRef, Size]:
        """The sizes of those whose digest, bytes and date are what they were."""
        entries = ((ref, self._entries.get(ref.path)) for ref in refs if _is_whole_file(ref))
        return {
            ref: Size(entry.width, entry.height)
            for ref, entry in entries
            if entry and entry[:3] == (ref.sha256, *_size_and_mtime(ref.path))
        }

    def add(self, sizes: Mapping[ImageRef, Size]) -> None:
        """Add what was opened just now.

        Raises:
            UserError: the file cannot be written.
        """
        whole = {ref: size for ref, size in sizes.items() if _is_whole_file(ref)}
        if not whole:
            return
        self._entries |= {
            ref.path: _OpenedFile(ref.sha256, *_size_and_mtime(ref.path), *size) for ref, size in whole.items()
        }
        with report_write_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps(self._entries))


def _is_whole_file(ref: ImageRef) -> bool:
    """Whether the picture is all of its file."""
    return ref.timestamp is None and ref.crop is None


def _size_and_mtime(path: str) -> tuple[int, int]:
    """Bytes and date of a file; (-1, -1) for none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return (-1, -1)
    return status.st_size, status.st_mtime_ns
