"""Open an image or video once, for its size or frame plan and for a fingerprint that finds similar images."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from mmrl.data_check.image_similarity import image_fingerprint
from mmrl.media.cache import MediaCache
from mmrl.media.video import FramePlan, FrameSampling
from mmrl.types import ImageRef, Size, VideoRef


@dataclass(frozen=True, slots=True)
class OpenedImage:
    """Size and fingerprint of an image that opened without an error."""

    size: Size
    """Width and height in pixels."""
    fingerprint: bytes
    """Its thumbnail, see `image_fingerprint`."""


@dataclass(frozen=True, slots=True)
class OpenedVideo:
    """Frame plan and fingerprint of a video whose frames decoded without an error."""

    frame_plan: FramePlan
    """The frames that the model sees."""
    fingerprint: bytes
    """The thumbnail of the middle one of these frames."""


def inspect_image(cache: MediaCache, ref: ImageRef) -> OpenedImage:
    """Open an image. Worker processes call this with an empty cache of their own.

    Raises:
        MediaError: the image cannot be used.
    """
    image = cache.get_image(ref)
    return OpenedImage(Size(*image.size), image_fingerprint(image))


def inspect_video(cache: MediaCache, sampling: FrameSampling, ref: VideoRef) -> OpenedVideo:
    """Decode every frame of a video that the model sees. Worker processes call this with an empty cache of their own.

    Raises:
        MediaError: the video cannot be used.
    """
    video = cache.read_video(ref, sampling)
    middle_CHW = video.frames_TCHW[len(video.frames_TCHW) // 2]
    # Bicubic resizing overshoots 0 and 255.
    image = Image.fromarray(middle_CHW.clamp(0, 255).byte().permute(1, 2, 0).numpy())
    return OpenedVideo(video.plan, image_fingerprint(image))
