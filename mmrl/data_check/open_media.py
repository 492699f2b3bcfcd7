"""What worker processes do: open a medium and look at it."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from mmrl.config.schema import MediaLimitsConfig
from mmrl.data_check.image_similarity import image_fingerprint
from mmrl.media.cache import MediaCache
from mmrl.media.video import FramePlan, FrameSampling
from mmrl.types import ImageRef, MediaPolicy, Size, VideoRef


@dataclass(frozen=True, slots=True)
class OpenedImage:
    """What opening a picture told."""

    size: Size
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class OpenedVideo:
    """What decoding a video told; the fingerprint is that of the frame in the middle."""

    frame_plan: FramePlan
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class ImageInspector:
    """Opens a picture, in whatever process it is called."""

    media_policy: MediaPolicy
    limits: MediaLimitsConfig

    def __call__(self, ref: ImageRef) -> OpenedImage:
        """Raises MediaError as the store does."""
        picture = MediaCache(self.media_policy, self.limits, max_bytes=0).get_image(ref)
        return OpenedImage(Size(*picture.size), image_fingerprint(picture))


@dataclass(frozen=True, slots=True)
class VideoInspector:
    """Decodes every frame that will be seen of a video, in whatever process it is called."""

    media_policy: MediaPolicy
    limits: MediaLimitsConfig
    sampling: FrameSampling

    def __call__(self, ref: VideoRef) -> OpenedVideo:
        """Raises MediaError as the store does."""
        clip = MediaCache(self.media_policy, self.limits, max_bytes=0).read_video(ref, self.sampling)
        middle_CHW = clip.frames_TCHW[len(clip.frames_TCHW) // 2]
        picture = Image.fromarray(middle_CHW.clamp(0, 255).byte().permute(1, 2, 0).numpy())
        return OpenedVideo(clip.plan, image_fingerprint(picture))
