"""Read a folder of images as a video, in natural order of their names and at a frame rate given by the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Final

import numpy as np

from mmrl.config.schema import MediaLimitsConfig
from mmrl.media.checks import MediaError, check_digest, check_length, resolve_media_path, unreadable_error
from mmrl.media.image import open_image
from mmrl.media.video_reader import FramePixels, VideoTimeline
from mmrl.types import ImageRef, Size, UserError, VideoRef
from mmrl.utils.files import compute_frames_digest, compute_sha256, list_frames, resolve_inside


class FrameFolderReader:
    """Reads the frames of a folder, with the interface of `VideoFileReader`. All have the size of the first."""

    def __init__(self, ref: VideoRef, fps: float, roots: Sequence[Path], limits: MediaLimitsConfig) -> None:
        """List and check the frames.

        Raises:
            MediaError: outside the roots, missing, changed since it was referenced, over a limit, or not a folder of
                images alone.
        """
        self._path, self._roots, self._limits = ref.path, roots, limits
        self._frames = self._list_frames()
        digests = {}
        for frame in self._frames:
            digests[Path(frame.path).name] = frame.sha256
        check_digest(ref.path, compute_frames_digest(digests), ref.sha256)
        count = len(self._frames)
        check_length(ref.path, count, count / fps, limits)
        # Time is counted in frames, and each frame decodes on its own.
        times = tuple(range(count))
        self.timeline: Final = VideoTimeline(
            timestamps=times, keyframe_timestamps=times, time_base=1 / Fraction(fps), fps=fps
        )
        self.size: Final = Size(*open_image(self._frames[0], roots, limits).size)

    def read_frames(self, indices: Sequence[int]) -> Iterator[FramePixels]:
        """Yield the frames of these indices: uint8 [height, width, 3], RGB, upright.

        Raises:
            MediaError: one of them cannot be opened, or has another size than the first.
        """
        for index in indices:
            frame = open_image(self._frames[index], self._roots, self._limits)
            if frame.size != self.size:
                size, first_size = "x".join(map(str, frame.size)), "x".join(map(str, self.size))
                path = self._frames[index].path
                raise MediaError(f"{path}: a frame of {size} in a folder of {first_size}; make them one size")
            yield np.asarray(frame)

    def _list_frames(self) -> list[ImageRef]:
        try:
            folder = resolve_inside(Path(self._path), self._roots)
            if not folder.is_dir():
                raise MediaError(f"{self._path}: no such folder of frames; correct the path or restore it")
            files = list_frames(folder, self._roots)
            check_length(self._path, len(files), 0.0, self._limits)
            return list(map(self._frame_ref, files))
        except OSError as error:
            raise unreadable_error(self._path, error) from error
        except UserError as error:
            raise MediaError(str(error)) from error

    def _frame_ref(self, file: Path) -> ImageRef:
        path = resolve_media_path(str(file), self._roots, self._limits.max_image_bytes, "max_image_bytes")
        return ImageRef(path=str(file), sha256=compute_sha256(path))
