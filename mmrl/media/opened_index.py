"""Remember the images and videos that a run has opened, so that a resumed run opens only new and changed ones."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from mmrl.types import ImageRef, Size, VideoRef
from mmrl.utils.digests import text_digest
from mmrl.utils.files import report_write_errors, write_atomically


class _OpenedFile(NamedTuple):
    sha256: str  # the hash in its reference
    num_bytes: int
    mtime_ns: int  # time of its last change, in nanoseconds since 1970
    width: int
    height: int


class OpenedMediaIndex:
    """A JSON file with an entry for each image and video that was opened without an error.

    It only spares the check before the first step. Training compares the sha256 of each file that it opens.
    """

    def __init__(self, path: Path) -> None:
        """Read the file. A missing or damaged one counts as empty, so everything is opened again."""
        self._path = path
        try:
            content = json.loads(path.read_text())
            self._entries = {name: _OpenedFile(*entry) for name, entry in content.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            self._entries = {}

    def known_sizes(self, refs: Iterable[ImageRef]) -> dict[ImageRef, Size]:
        """Return the sizes of images whose reference and file are unchanged since they were opened."""
        sizes = {}
        for ref in filter(_is_whole_file, refs):
            entry = self._entries.get(ref.path)
            if entry is not None and entry[:3] == (ref.sha256, *_size_and_mtime(ref.path)):
                sizes[ref] = Size(entry.width, entry.height)
        return sizes

    def add(self, sizes: Mapping[ImageRef, Size]) -> None:
        """Add images that were just opened, and write the file; raises UserError if it cannot be written."""
        opened = {ref: size for ref, size in sizes.items() if _is_whole_file(ref)}
        for ref, size in opened.items():
            self._entries[ref.path] = _OpenedFile(ref.sha256, *_size_and_mtime(ref.path), *size)
        if opened:
            self._write()

    def known_videos(self, refs: Iterable[VideoRef], reading: str) -> set[VideoRef]:
        """Return the videos whose frames were decoded before, with the same content and in the same way.

        `reading` says which frames, at which size, and by which library.
        """
        return {ref for ref in refs if _video_key(ref, reading) in self._entries}

    def add_videos(self, sizes: Mapping[VideoRef, Size], reading: str) -> None:
        """Add videos of these sizes, whose frames were just decoded; raises UserError if it cannot be written."""
        for ref, size in sizes.items():
            # Known by the sha256 alone, which each run computes again: a folder of frames is more than one file.
            self._entries[_video_key(ref, reading)] = _OpenedFile(ref.sha256, -1, -1, *size)
        if sizes:
            self._write()

    def _write(self) -> None:
        with report_write_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps(self._entries))


def _video_key(ref: VideoRef, reading: str) -> str:
    """Return the key of a video in the file, which no path of an image equals."""
    content = repr((ref.sha256, ref.start, ref.end, ref.fps, reading))
    return f"video {text_digest(content)}"


def _is_whole_file(ref: ImageRef) -> bool:
    """Return True if the image is a whole file, not a crop or a frame of a video."""
    return ref.timestamp is None and ref.crop is None


def _size_and_mtime(path: str) -> tuple[int, int]:
    """Return bytes and time of the last change of a file, or (-1, -1) if there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return (-1, -1)
    return status.st_size, status.st_mtime_ns
