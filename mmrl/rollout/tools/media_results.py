"""What a tool may ask to be shown instead of words, and which media that is. Nothing heavy is loaded here.

Media are counted from 1 in the order in which a response saw them: the question's, then what tools showed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor

from mmrl.types import CoordinateSystem, ImageRef, MediaRef, ResizeMap, Rollout, VideoRef


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCrop:
    """A part of a picture: x1, y1, x2, y2 on that very picture, in the frame in which the model writes coordinates."""

    medium_number: int
    box: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoFrames:
    """What a video shows at these seconds of it, a picture each."""

    medium_number: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoClip:
    """A part of a video, in seconds of it; its frames are chosen as those of any video."""

    medium_number: int
    start: float
    end: float


MediaResult = ImageCrop | VideoFrames | VideoClip


def find_media(result: MediaResult, rollout: Rollout) -> Iterator[tuple[str, MediaRef]]:
    """The media that are to be shown, each with words that say what it is.

    Raises:
        ValueError: there are none, in words for the model.
    """
    media = rollout.media
    if not 1 <= result.medium_number <= len(media):
        raise ValueError(f"there is no medium {result.medium_number}; there are {len(media)}, counted from 1")
    ref = media[result.medium_number - 1]
    if isinstance(result, ImageCrop):
        if isinstance(ref, VideoRef):
            raise ValueError(f"medium {result.medium_number} is a video; look at one of its frames first")
        yield _crop_image(
            result, ref, _resize_maps(rollout)[result.medium_number - 1], rollout.prompt.coordinate_system
        )
        return
    if isinstance(ref, ImageRef):
        raise ValueError(f"medium {result.medium_number} is a picture, and no video")
    if isinstance(result, VideoClip):
        part = replace(ref, start=result.start, end=result.end)
        yield f"from {result.start:g} to {result.end:g} seconds of medium {result.medium_number}", part
        return
    for second in result.seconds:
        frame = ImageRef(path=ref.path, sha256=ref.sha256, corruption=ref.corruption, timestamp=second, fps=ref.fps)
        yield f"medium {result.medium_number} at {second:g} seconds", frame


def _resize_maps(rollout: Rollout) -> Sequence[ResizeMap]:
    return (*rollout.prompt.resize_maps, *(view.resize_map for view in rollout.observations))


def _crop_image(
    image_crop: ImageCrop, ref: ImageRef, resize: ResizeMap, frame: CoordinateSystem
) -> tuple[str, ImageRef]:
    """All pixels that the box touches, as far as there are any."""
    x1, y1, x2, y2 = resize.convert(image_crop.box, frame, CoordinateSystem.PX_ORIGINAL)
    (left, top), (width, height) = resize.offset, resize.original
    crop = (
        max(left, floor(x1)),
        max(top, floor(y1)),
        min(left + width, ceil(x2)),
        min(top + height, ceil(y2)),
    )
    if crop[0] >= crop[2] or crop[1] >= crop[3]:
        raise ValueError(f"the box {_format_box(image_crop.box)} holds nothing of medium {image_crop.medium_number}")
    where = resize.convert(crop, CoordinateSystem.PX_ORIGINAL, frame)
    return f"the part {_format_box(where)} of medium {image_crop.medium_number}", replace(ref, crop=crop)


def _format_box(box: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:.5g}' for value in box)}]"
