"""Each picture is decoded once: the most recently used ones stay in memory, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict

from PIL import Image

from mmrl.config.schema import Limits
from mmrl.media import video
from mmrl.media.image import open_image
from mmrl.media.video import Clip, ClipPlan, ClipRule
from mmrl.types import Access, ImageRef, Size, VideoRef


class MediaStore:
    """Opens pictures through a cache of decoded pixels (3 bytes each), the least recently used leaving first."""

    def __init__(self, access: Access, limits: Limits, *, max_bytes: int) -> None:
        self._access = access
        self._limits = limits
        self._max_bytes = max_bytes
        self._bytes = 0
        self._pictures: OrderedDict[ImageRef, Image.Image] = OrderedDict()
        self._sizes: dict[ImageRef, Size] = {}

    def size(self, ref: ImageRef) -> Size:
        """Width and height of a picture; it is opened only if it never was.

        Raises:
            MediaError: as `open_image`.
        """
        return self._sizes[ref] if ref in self._sizes else Size(*self.open(ref).size)

    def open(self, ref: ImageRef) -> Image.Image:
        """The picture, 8-bit RGB, upright. It is shared: do not draw on it.

        Raises:
            MediaError: as `open_image`.
        """
        if ref in self._pictures:
            self._pictures.move_to_end(ref)
            return self._pictures[ref]
        picture = open_image(ref, self._limits)
        self._sizes[ref] = Size(*picture.size)
        self._pictures[ref] = picture
        self._bytes += _size(picture)
        while self._bytes > self._max_bytes:
            _, oldest = self._pictures.popitem(last=False)
            self._bytes -= _size(oldest)
        return picture

    def plan(self, ref: VideoRef, rule: ClipRule) -> ClipPlan:
        """Which frames of a video are taken."""
        return video.plan(ref, rule)

    def clip(self, ref: VideoRef, rule: ClipRule) -> Clip:
        """The frames."""
        return video.clip(ref, rule)


def _size(picture: Image.Image) -> int:
    return 3 * picture.width * picture.height
