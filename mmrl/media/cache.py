"""Open images and videos, and keep the most recently used images in memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from PIL import Image

from mmrl.config.schema import MediaLimitsConfig
from mmrl.media.corruptions import corrupt_image, corrupt_video
from mmrl.media.decord_reader import load_decord
from mmrl.media.image import check_image, crop_image, open_image
from mmrl.media.video import (
    DecodedVideo,
    FramePlan,
    FrameSampling,
    check_frames_agree,
    decode_frames,
    find_frame,
    open_reader,
    plan_frames,
)
from mmrl.types import ImageRef, MediaError, MediaPolicy, Size, VideoRef
from mmrl.utils.byte_cache import ByteCache


class MediaCache:
    """Opens images through a cache of decoded pixels. The least recently used images leave it first.

    Of videos it remembers the frame plans; their frames are decoded each time. A cache that keeps no image can be
    sent to another process and opens media there.
    """

    def __init__(self, media_policy: MediaPolicy, limits: MediaLimitsConfig, *, max_bytes: int = 2**28) -> None:
        """Create a cache of `max_bytes` (256 MiB), at 3 bytes a pixel; 0 keeps no image.

        Raises:
            UserError: decord is to read videos and is not installed.
        """
        if media_policy.video_reader == "decord":
            load_decord()
        self.media_policy = media_policy
        self.limits = limits
        self._images: ByteCache[ImageRef, Image.Image] = ByteCache(max_bytes, keep_last=False)
        self._sizes: dict[ImageRef, Size] = {}
        self._frame_plans: dict[tuple[VideoRef, FrameSampling], FramePlan] = {}

    def image_size(self, ref: ImageRef) -> Size:
        """Return the size of an image in pixels, opening it unless its size is known; raises as `get_image`."""
        if ref not in self._sizes:
            self.get_image(ref)
        return self._sizes[ref]

    def set_image_size(self, ref: ImageRef, size: Size) -> None:
        """Remember the size of an image that another process opened."""
        self._sizes[ref] = size

    def set_frame_plan(self, ref: VideoRef, sampling: FrameSampling, plan: FramePlan) -> None:
        """Remember the frame plan of a video that another process opened."""
        self._frame_plans[_frame_plan_key(ref, sampling)] = plan

    def get_image(self, ref: ImageRef) -> Image.Image:
        """Return an image, 8-bit RGB, upright. It is shared with other callers: do not draw on it.

        Raises:
            MediaError: the file, the video's frame or the crop cannot be used (see `open_image`, `open_reader`,
                `find_frame` and `crop_image`).
        """
        cached = self._images.get(ref)
        if cached is not None:
            return cached
        if ref.crop is not None:
            # Through the cache, so that several crops of one image open it once.
            image = crop_image(self.get_image(replace(ref, crop=None)), ref, ref.crop, self.limits)
        elif ref.timestamp is not None:
            video = VideoRef(path=ref.path, sha256=ref.sha256, fps=ref.fps)
            with open_reader(video, self.media_policy, self.limits) as reader:
                (pixels,) = reader.read_frames([find_frame(ref.path, ref.timestamp, reader.timeline)])
            image = corrupt_image(Image.fromarray(np.ascontiguousarray(pixels)), ref)
        else:
            image = corrupt_image(open_image(ref, self.media_policy.roots, self.limits), ref)
        self._sizes[ref] = Size(*image.size)
        self._images.put(ref, image, 3 * image.width * image.height)
        return image

    def get_frame_plan(self, ref: VideoRef, sampling: FrameSampling) -> FramePlan:
        """Return the frames of a video that the model sees, and their size.

        Raises:
            MediaError: the video cannot be used (see `open_reader` and `plan_frames`).
        """
        key = _frame_plan_key(ref, sampling)
        if key not in self._frame_plans:
            with open_reader(ref, self.media_policy, self.limits) as reader:
                self._frame_plans[key] = plan_frames(ref, sampling, reader, self.limits)
        return self._frame_plans[key]

    def read_video(self, ref: VideoRef, sampling: FrameSampling) -> DecodedVideo:
        """Decode the frames of a video that the model sees.

        Raises:
            MediaError: as `get_frame_plan`; a frame does not decode; or the frame plan differs from the earlier one,
                with which the prompt was measured.
        """
        video = self._decode(ref, sampling, self.media_policy)
        if video.plan != self._frame_plans.setdefault(_frame_plan_key(ref, sampling), video.plan):
            raise MediaError(f"{ref.path}: its frames differ from those planned before; restore it")
        return corrupt_video(video, ref)

    def check_image(self, ref: ImageRef) -> Size:
        """Return the size of an image that `get_image` can open; raises as it does.

        A run calls this for each image before its first step.
        """
        if ref.crop is None and ref.timestamp is None:
            return check_image(ref, self.media_policy.roots, self.limits)
        self.get_image(ref)
        return self._sizes[ref]

    def check_video(self, ref: VideoRef, sampling: FrameSampling) -> DecodedVideo:
        """Decode the frames of a video that the model sees, and compare decord's with PyAV's.

        A run calls this for each video before its first step, and so does `mmrl data check`.

        Raises:
            MediaError: as `get_frame_plan`; a frame does not decode; or decord and PyAV give different frames.
        """
        video = self._decode(ref, sampling, self.media_policy)
        if self.media_policy.video_reader == "decord":
            by_pyav = self._decode(ref, sampling, replace(self.media_policy, video_reader="pyav"))
            check_frames_agree(ref.path, video, by_pyav)
        return video

    def _decode(self, ref: VideoRef, sampling: FrameSampling, media_policy: MediaPolicy) -> DecodedVideo:
        with open_reader(ref, media_policy, self.limits) as reader:
            return decode_frames(reader, plan_frames(ref, sampling, reader, self.limits))


def _frame_plan_key(ref: VideoRef, sampling: FrameSampling) -> tuple[VideoRef, FrameSampling]:
    """Return the key of a frame plan, without the corruption: it changes pixels, not the plan."""
    return replace(ref, corruption=None), sampling
