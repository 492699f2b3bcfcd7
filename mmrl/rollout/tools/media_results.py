"""Finds the parts of images and videos that tools and environments show.

Media are counted from 1 in the order in which a response saw them: the question's, then the media of earlier results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, floor, inf

from mmrl.types import (
    CoordinateSystem,
    ImageCrop,
    ImageRef,
    MediaRef,
    MediaResult,
    ResizeMap,
    Rollout,
    VideoClip,
    VideoRef,
)


def find_media(result: MediaResult, rollout: Rollout) -> Iterator[tuple[str, MediaRef]]:
    """Yield the images or videos of a result, each with words for the model that describe it.

    Raises:
        ValueError: no medium has this number, or it has no such part; in words for the model.
    """
    media = rollout.media
    number = result.medium_number
    if not 1 <= number <= len(media):
        raise ValueError(f"there is no medium {number}; there are {len(media)}, counted from 1")
    ref = media[number - 1]
    if isinstance(result, ImageCrop):
        if isinstance(ref, VideoRef):
            raise ValueError(f"medium {number} is a video; look at one of its frames first")
        resize_maps = (*rollout.prompt.resize_maps, *(observation.resize_map for observation in rollout.observations))
        yield _crop_image(result, ref, resize_maps[number - 1], rollout.prompt.coordinate_system)
        return
    if isinstance(ref, ImageRef):
        raise ValueError(f"medium {number} is a picture, not a video")
    if isinstance(result, VideoClip):
        _check_seconds((result.start, result.end), ref, number)
        label = f"from {result.start:g} to {result.end:g} seconds of medium {number}"
        yield label, replace(ref, start=result.start, end=result.end)
        return
    _check_seconds(result.seconds, ref, number)
    for second in result.seconds:
        frame = ImageRef(path=ref.path, sha256=ref.sha256, corruption=ref.corruption, timestamp=second, fps=ref.fps)
        yield f"medium {number} at {second:g} seconds", frame


def _check_seconds(seconds: Sequence[float], ref: VideoRef, number: int) -> None:
    """Raise ValueError for seconds outside the part of a video that the question, or an earlier call, shows."""
    start = 0.0 if ref.start is None else ref.start
    end = inf if ref.end is None else ref.end
    for second in seconds:
        if not start <= second <= end:
            last = "its end" if ref.end is None else f"{end:g} s"
            raise ValueError(f"{second:g} s is outside medium {number}, which lasts from {start:g} s to {last}")


def _crop_image(
    image_crop: ImageCrop, ref: ImageRef, resize_map: ResizeMap, coordinate_system: CoordinateSystem
) -> tuple[str, ImageRef]:
    """Return a description, in the model's coordinates, and a reference to all pixels that the box touches."""
    # The crop counts pixels of the file even if the image is itself a crop, so the part is as sharp as the file.
    units = image_crop.coordinate_system or coordinate_system
    x1, y1, x2, y2 = resize_map.convert(image_crop.box, units, CoordinateSystem.PX_ORIGINAL)
    (left, top), (width, height) = resize_map.offset, resize_map.original
    crop = (max(left, floor(x1)), max(top, floor(y1)), min(left + width, ceil(x2)), min(top + height, ceil(y2)))
    number = image_crop.medium_number
    if crop[0] >= crop[2] or crop[1] >= crop[3]:
        raise ValueError(f"the box {_format_box(image_crop.box)} holds nothing of medium {number}")
    box = resize_map.convert(crop, CoordinateSystem.PX_ORIGINAL, coordinate_system)
    return f"the part {_format_box(box)} of medium {number}", replace(ref, crop=crop)


def _format_box(box: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:.5g}' for value in box)}]"
