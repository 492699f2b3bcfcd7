"""Each picture is decoded once: the most recently used ones stay in memory, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from PIL import Image

from mmrl.config.schema import MediaLimitsConfig
from mmrl.media.checks import MediaError
from mmrl.media.corruptions import corrupt_image, corrupt_video
from mmrl.media.image import crop_image, open_image
from mmrl.media.video import DecodedVideo, FramePlan, FrameSampling, plan_frames, read_video_frame, read_video_frames
from mmrl.types import ImageRef, MediaPolicy, Size, VideoRef


class MediaCache:
    """Opens pictures through a cache of decoded pixels (3 bytes each), the least recently used leaving first.

    Of videos it remembers what was planned, not their frames.
    """

    def __init__(self, access: MediaPolicy, limits: MediaLimitsConfig, *, max_bytes: int) -> None:
        self._roots = access.roots
        self._limits = limits
        self._max_bytes = max_bytes
        self._used_bytes = 0
        self._images: OrderedDict[ImageRef, Image.Image] = OrderedDict()
        self._sizes: dict[ImageRef, Size] = {}
        self._frame_plans: dict[tuple[VideoRef, FrameSampling], FramePlan] = {}

    def image_size(self, ref: ImageRef) -> Size:
        """Width and height of a picture; it is opened only if it never was.

        Raises:
            MediaError: as `open_image`.
        """
        return self._sizes[ref] if ref in self._sizes else Size(*self.get_image(ref).size)

    def set_image_size(self, ref: ImageRef, size: Size) -> None:
        """Take the size of a picture that another process opened."""
        self._sizes[ref] = size

    def set_frame_plan(self, ref: VideoRef, sampling: FrameSampling, plan: FramePlan) -> None:
        """Take the plan that another process made of a video."""
        self._frame_plans[ref, sampling] = plan

    def get_image(self, ref: ImageRef) -> Image.Image:
        """The picture, 8-bit RGB, upright. It is shared: do not draw on it.

        Raises:
            MediaError: as `open_image`, `read_frame` and `part_of`.
        """
        if ref in self._images:
            self._images.move_to_end(ref)
            return self._images[ref]
        picture = self._load_image(ref)
        self._sizes[ref] = Size(*picture.size)
        self._images[ref] = picture
        self._used_bytes += _num_bytes(picture)
        while self._used_bytes > self._max_bytes:
            _, oldest = self._images.popitem(last=False)
            self._used_bytes -= _num_bytes(oldest)
        return picture

    def _load_image(self, ref: ImageRef) -> Image.Image:
        if ref.crop is not None:
            return crop_image(self.get_image(replace(ref, crop=None)), ref, ref.crop, self._limits)
        if ref.timestamp is not None:
            return corrupt_image(read_video_frame(ref, ref.timestamp, self._roots, self._limits), ref)
        return corrupt_image(open_image(ref, self._roots, self._limits), ref)

    def get_frame_plan(self, ref: VideoRef, sampling: FrameSampling) -> FramePlan:
        """Which frames of a video will be seen, and how large; the file is read only if it never was.

        Raises:
            MediaError: as `plan_clip`.
        """
        key = replace(ref, corruption=None), sampling  # what hides the frames leaves the plan alone
        if key not in self._frame_plans:
            self._frame_plans[key] = plan_frames(ref, sampling, self._roots, self._limits)
        return self._frame_plans[key]

    def read_video(self, ref: VideoRef, sampling: FrameSampling) -> DecodedVideo:
        """The frames of a video, decoded anew each time.

        Raises:
            MediaError: as `read_clip`; it is not what was planned.
        """
        clip = read_video_frames(ref, sampling, self._roots, self._limits)
        if clip.plan != self._frame_plans.setdefault((replace(ref, corruption=None), sampling), clip.plan):
            raise MediaError(f"{ref.path}: its frames are not those planned before; restore it")
        return corrupt_video(clip, ref)


def _num_bytes(picture: Image.Image) -> int:
    return 3 * picture.width * picture.height
