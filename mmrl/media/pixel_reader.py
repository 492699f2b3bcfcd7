"""Opens the media of samples for rewards, each once, in whatever process the rewards run.

Every worker process receives a `PixelReader`. It imports image and video libraries when a reward first opens a medium,
so that workers whose rewards open none start without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, Final

from mmrl.config.schema import MediaLimitsConfig
from mmrl.types import ImageRef, MediaPolicy, MediaRangeError, Size, VideoRef
from mmrl.utils.byte_cache import ByteCache

if TYPE_CHECKING:
    import numpy as np

    Pixels = np.ndarray[Any, np.dtype[np.uint8]]

_CACHE_BYTES: Final = 2**27


class PixelReader:
    """Implements `MediaOpener`. The most recently used images and frames stay in memory, so that siblings share them.

    A pickled copy has the same policy and limits, but no pixels.
    """

    def __init__(self, media_policy: MediaPolicy, limits: MediaLimitsConfig | None = None) -> None:
        """Open no file before the first call. `limits` is `data.media_limits`; None for its defaults."""
        self._media_policy, self._limits = media_policy, limits or MediaLimitsConfig()
        # By the reference, the second of a video, and the size.
        self._pixels: ByteCache[tuple[ImageRef | VideoRef, float, Size | None], Pixels] = ByteCache(_CACHE_BYTES)

    def __reduce__(self) -> tuple[type[PixelReader], tuple[MediaPolicy, MediaLimitsConfig]]:
        """Leave the pixels out."""
        return PixelReader, (self._media_policy, self._limits)

    def read_image(self, ref: ImageRef, size: Size | None) -> Pixels:
        """Return an image, without its corruption: uint8 [height, width, 3], read-only, bicubic where resized.

        Raises:
            MediaError: the file, the video's frame or the crop cannot be used.
        """
        ref = replace(ref, corruption=None) if ref.corruption else ref
        pixels = self._pixels.get((ref, 0.0, size))
        if pixels is None:
            pixels = self._open_image(ref) if size is None else _resize(self.read_image(ref, None), size)
            self._keep((ref, 0.0, size), pixels)
        return pixels

    def read_frames(self, ref: VideoRef, seconds: Sequence[float], size: Size | None) -> Pixels:
        """Return the frames that a video shows at these seconds: uint8 [frames, height, width, 3], read-only.

        Raises:
            MediaError: the file cannot be used, or a frame does not decode.
            MediaRangeError: the video, or the part of it that the reference names, has no such second.
        """
        import numpy as np

        ref = replace(ref, corruption=None) if ref.corruption else ref
        # Collected here as well, since frames of a long list may leave the cache again.
        frames: dict[float, Pixels] = {}
        for second in seconds:
            cached = self._pixels.get((ref, second, size))
            if cached is not None:
                frames[second] = cached
        missing = [second for second in seconds if second not in frames]
        opened = self._open_frames(ref, missing) if missing else {}
        for second, pixels in opened.items():
            frames[second] = pixels if size is None else _resize(pixels, size)
            self._keep((ref, second, size), frames[second])
        stacked = np.stack([frames[second] for second in seconds])
        stacked.flags.writeable = False
        return stacked

    def _open_image(self, ref: ImageRef) -> Pixels:
        import numpy as np

        if ref.timestamp is None:
            from mmrl.media.image import open_shown_image

            return np.asarray(open_shown_image(ref, self._media_policy.roots, self._limits))
        # This module imports torch, which takes seconds: a process that reads no video does not wait for it.
        from mmrl.media.cache import MediaCache

        return np.asarray(MediaCache(self._media_policy, self._limits, max_bytes=0).get_image(ref))

    def _open_frames(self, ref: VideoRef, seconds: Sequence[float]) -> dict[float, Pixels]:
        import numpy as np

        # As in `_open_image`.
        from mmrl.media.video import find_frame, open_reader

        for second in seconds:
            if not (ref.start or 0.0) <= second <= (inf if ref.end is None else ref.end):
                part = f"from {ref.start or 0.0:g} to {'its end' if ref.end is None else f'{ref.end:g} s'}"
                raise MediaRangeError(f"{ref.path}: {second:g} s is not in the part {part} that the sample shows")
        with open_reader(ref, self._media_policy, self._limits) as reader:
            indices = {second: find_frame(ref.path, second, reader.timeline) for second in seconds}
            wanted = sorted(set(indices.values()))
            frames = dict(zip(wanted, reader.read_frames(wanted), strict=True))
        return {second: np.ascontiguousarray(frames[index]) for second, index in indices.items()}

    def _keep(self, key: tuple[ImageRef | VideoRef, float, Size | None], pixels: Pixels) -> None:
        # All callers share the array.
        pixels.flags.writeable = False
        self._pixels.put(key, pixels, pixels.nbytes)


def _resize(pixels: Pixels, size: Size) -> Pixels:
    import numpy as np
    from PIL import Image

    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
