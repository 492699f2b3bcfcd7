"""Remember the images and videos that runs have opened, so that a run opens only new and changed ones at its start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

import PIL

from mmrl.config.schema import MediaLimitsConfig
from mmrl.types import ImageRef, MediaPolicy, Size, UserError, VideoRef
from mmrl.utils.digests import text_digest
from mmrl.utils.file_index import FileIndex, stamp_file
from mmrl.utils.files import resolve_inside

_NO_FILE = ""
"""Path of every video's entry: the sha256 identifies a video, because a folder of frames is more than one file."""


class OpenedMediaIndex:
    """Entries of a `FileIndex` for the images and videos that were opened without an error, under the same limits.

    It only spares the check before the first step. Training compares the sha256 of each file that it opens.
    """

    def __init__(self, files: FileIndex, policy: MediaPolicy, limits: MediaLimitsConfig) -> None:
        """Keep entries in `files`. Images outside the folders of `policy` are unknown, whichever run opened them."""
        self.files, self._roots = files, policy.roots
        # Other limits, or another Pillow, may refuse what was opened.
        self._opening = text_digest(f"{limits!r} {PIL.__version__}")[:16]
        self._image_kind = f"image {self._opening}"

    def known_sizes(self, refs: Iterable[ImageRef]) -> dict[ImageRef, Size]:
        """Return the sizes of images whose reference and file are unchanged since they were opened."""
        sizes, folders = {}, dict[str, str]()
        for ref in filter(_is_whole_file, refs):
            entry = self.files.get(self._image_kind, ref.path)
            if entry is None:
                continue
            with suppress(UserError, ValueError):
                resolve_inside(ref.path, self._roots, folders)
                sha256, width, height = entry.split()
                if sha256 == ref.sha256:
                    sizes[ref] = Size(int(width), int(height))
        return sizes

    def add(self, sizes: Mapping[ImageRef, Size]) -> None:
        """Add images that were just opened."""
        for ref, size in sizes.items():
            if _is_whole_file(ref):
                value = f"{ref.sha256} {size.width} {size.height}"
                self.files.put(self._image_kind, ref.path, value, stamp_file(ref.path))
        self.files.flush()

    def known_videos(self, refs: Iterable[VideoRef], reading: str) -> set[VideoRef]:
        """Return the videos whose frames were decoded before, with the same content and in the same way.

        `reading` says which frames, at which size, and by which library.
        """
        return {ref for ref in refs if self.files.get(self._video_kind(ref, reading), _NO_FILE) is not None}

    def add_videos(self, refs: Iterable[VideoRef], reading: str) -> None:
        """Add videos whose frames were just decoded."""
        for ref in refs:
            self.files.put(self._video_kind(ref, reading), _NO_FILE, "", stamp_file(_NO_FILE))
        self.files.flush()

    def _video_kind(self, ref: VideoRef, reading: str) -> str:
        return f"video {text_digest(repr((ref.sha256, ref.start, ref.end, ref.fps, reading, self._opening)))}"


def _is_whole_file(ref: ImageRef) -> bool:
    """Return True if the image is a whole file, not a crop or a frame of a video."""
    return ref.timestamp is None and ref.crop is None
