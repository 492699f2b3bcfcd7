"""Each picture is decoded once: the most recently used ones stay in memory, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from PIL import Image

from mmrl.config.schema import Limits
from mmrl.media.checks import MediaError
from mmrl.media.corruptions import veiled_clip, veiled_picture
from mmrl.media.image import open_image, part_of
from mmrl.media.video import Clip, ClipPlan, ClipRule, plan_clip, read_clip, read_frame
from mmrl.types import Access, ImageRef, Size, VideoRef


class MediaStore:
    """Opens pictures through a cache of decoded pixels (3 bytes each), the least recently used leaving first.

    Of videos it remembers what was planned, not their frames.
    """

    def __init__(self, access: Access, limits: Limits, *, max_bytes: int) -> None:
        self._roots = access.roots
        self._limits = limits
        self._max_bytes = max_bytes
        self._bytes = 0
        self._pictures: OrderedDict[ImageRef, Image.Image] = OrderedDict()
        self._sizes: dict[ImageRef, Size] = {}
        self._plans: dict[tuple[VideoRef, ClipRule], ClipPlan] = {}

    def size(self, ref: ImageRef) -> Size:
        """Width and height of a picture; it is opened only if it never was.

        Raises:
            MediaError: as `open_image`.
        """
        return self._sizes[ref] if ref in self._sizes else Size(*self.open(ref).size)

    def remember(self, ref: ImageRef, size: Size) -> None:
        """Take the size of a picture that another process opened."""
        self._sizes[ref] = size

    def remember_plan(self, ref: VideoRef, rule: ClipRule, plan: ClipPlan) -> None:
        """Take the plan that another process made of a video."""
        self._plans[ref, rule] = plan

    def open(self, ref: ImageRef) -> Image.Image:
        """The picture, 8-bit RGB, upright. It is shared: do not draw on it.

        Raises:
            MediaError: as `open_image`, `read_frame` and `part_of`.
        """
        if ref in self._pictures:
            self._pictures.move_to_end(ref)
            return self._pictures[ref]
        picture = self._picture(ref)
        self._sizes[ref] = Size(*picture.size)
        self._pictures[ref] = picture
        self._bytes += _size(picture)
        while self._bytes > self._max_bytes:
            _, oldest = self._pictures.popitem(last=False)
            self._bytes -= _size(oldest)
        return picture

    def _picture(self, ref: ImageRef) -> Image.Image:
        if ref.crop is not None:
            return part_of(self.open(replace(ref, crop=None)), ref, ref.crop, self._limits)
        if ref.at is not None:
            return veiled_picture(read_frame(ref, ref.at, self._roots, self._limits), ref)
        return veiled_picture(open_image(ref, self._roots, self._limits), ref)

    def plan(self, ref: VideoRef, rule: ClipRule) -> ClipPlan:
        """Which frames of a video will be seen, and how large; the file is read only if it never was.

        Raises:
            MediaError: as `plan_clip`.
        """
        key = replace(ref, veil=None), rule  # what hides the frames leaves the plan alone
        if key not in self._plans:
            self._plans[key] = plan_clip(ref, rule, self._roots, self._limits)
        return self._plans[key]

    def clip(self, ref: VideoRef, rule: ClipRule) -> Clip:
        """The frames of a video, decoded anew each time.

        Raises:
            MediaError: as `read_clip`; it is not what was planned.
        """
        clip = read_clip(ref, rule, self._roots, self._limits)
        if clip.plan != self._plans.setdefault((replace(ref, veil=None), rule), clip.plan):
            raise MediaError(f"{ref.path}: its frames are not those planned before; restore it")
        return veiled_clip(clip, ref)


def _size(picture: Image.Image) -> int:
    return 3 * picture.width * picture.height
