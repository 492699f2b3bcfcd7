"""What worker processes do: open a medium and look at it."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from mmrl.config.schema import Limits
from mmrl.data_check.image_similarity import fingerprint
from mmrl.media.cache import MediaStore
from mmrl.media.video import ClipPlan, ClipRule
from mmrl.types import Access, ImageRef, Size, VideoRef


@dataclass(frozen=True, slots=True)
class Seen:
    """What opening a picture told."""

    size: Size
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Watched:
    """What decoding a video told; the fingerprint is that of the frame in the middle."""

    plan: ClipPlan
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Inspect:
    """Opens a picture, in whatever process it is called."""

    access: Access
    limits: Limits

    def __call__(self, ref: ImageRef) -> Seen:
        """Raises MediaError as the store does."""
        picture = MediaStore(self.access, self.limits, max_bytes=0).open(ref)
        return Seen(Size(*picture.size), fingerprint(picture))


@dataclass(frozen=True, slots=True)
class Watch:
    """Decodes every frame that will be seen of a video, in whatever process it is called."""

    access: Access
    limits: Limits
    rule: ClipRule

    def __call__(self, ref: VideoRef) -> Watched:
        """Raises MediaError as the store does."""
        clip = MediaStore(self.access, self.limits, max_bytes=0).clip(ref, self.rule)
        middle_CHW = clip.frames_TCHW[len(clip.frames_TCHW) // 2]
        picture = Image.fromarray(middle_CHW.clamp(0, 255).byte().permute(1, 2, 0).numpy())
        return Watched(clip.plan, fingerprint(picture))
