"""A folder of pictures as a video: its frames in natural order, at a rate that whoever names it says."""

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
    """Frames in a folder, with the face of `TrackReader`; the first of them says how large all are."""

    def __init__(self, ref: VideoRef, fps: float, roots: Sequence[Path], limits: MediaLimitsConfig) -> None:
        """Raises MediaError: outside the roots, missing, changed since it was referenced, over a limit, or not a folder
        of pictures alone.
        """
        self._path, self._roots, self._limits = ref.path, roots, limits
        self._frames = self._list_frames()
        check_digest(
            ref.path, compute_frames_digest({Path(one.path).name: one.sha256 for one in self._frames}), ref.sha256
        )
        count = len(self._frames)
        check_length(ref.path, count, count / fps, limits)
        times = tuple(range(count))
        self.timeline: Final = VideoTimeline(
            timestamps=times, keyframe_timestamps=times, time_base=1 / Fraction(fps), fps=fps
        )
        self.size: Final = Size(*open_image(self._frames[0], roots, limits).size)

    def read_frames(self, indices: Sequence[int]) -> Iterator[FramePixels]:
        """The frames of these indices: uint8 [H, W, 3], RGB, upright.

        Raises:
            MediaError: one of them cannot be opened, or has another size than the first.
        """
        for index in indices:
            picture = open_image(self._frames[index], self._roots, self._limits)
            if picture.size != self.size:
                size, first = "x".join(map(str, picture.size)), "x".join(map(str, self.size))
                path = self._frames[index].path
                raise MediaError(f"{path}: a frame of {size} in a folder of {first}; make them one size")
            yield np.asarray(picture)

    def _list_frames(self) -> list[ImageRef]:
        try:
            folder = resolve_inside(Path(self._path), self._roots)
            if not folder.is_dir():
                raise MediaError(f"{self._path}: no such folder of frames; correct the path or restore it")
            files = list_frames(folder, self._roots)
            check_length(self._path, len(files), 0.0, self._limits)
            return [self._frame_ref(file) for file in files]
        except OSError as error:
            raise unreadable_error(self._path, error) from error
        except UserError as error:
            raise MediaError(str(error)) from error

    def _frame_ref(self, file: Path) -> ImageRef:
        place = resolve_media_path(str(file), self._roots, self._limits.max_image_bytes, "max_image_bytes")
        return ImageRef(path=str(file), sha256=compute_sha256(place))
