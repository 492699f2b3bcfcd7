"""Find boxes and points of answers that lie outside their image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Final

from mmrl.types import AnswerType, CoordinateSystem, ResizeMap, Sample, Target

TOLERANCE_PX: Final = 1.0
"""Annotations that count pixels from 1, or round up, lie one pixel outside at the right and bottom edges."""


def target_coordinates(target: Target) -> tuple[tuple[float, ...], ...]:
    """Return the boxes (x1, y1, x2, y2) or points (x, y) of an answer; none for answers of other types."""
    match target.answer_type:
        case AnswerType.BOX | AnswerType.POINT:
            return (tuple(target.value),)
        case AnswerType.BOXES | AnswerType.POINTS:
            return tuple(tuple(region.coordinates) for region in target.value)
    return ()


def find_outside_image(sample: Sample, resize_maps: Sequence[ResizeMap]) -> Iterator[str]:
    """Yield a message for each box or point of a sample's answer and label that lies outside its image.

    Args:
        sample: the sample.
        resize_maps: the maps of its images and videos, in reading order.
    """
    for role, target in (("answer", sample.target), ("label", sample.label)):
        if target is None or target.coordinate_system is None:
            continue
        if target.media_index >= len(resize_maps):
            yield (
                f"its {role} lies in image or video {target.media_index} (counted from 0), "
                f"and it has {len(resize_maps)}"
            )
            continue
        resize_map = resize_maps[target.media_index]
        for values in target_coordinates(target):
            pixels = resize_map.convert(values, target.coordinate_system, CoordinateSystem.PX_ORIGINAL)
            is_within = all(
                isfinite(value) and -TOLERANCE_PX <= value <= resize_map.original[index % 2] + TOLERANCE_PX
                for index, value in enumerate(pixels)  # x, y, x, y, ...
            )
            if not is_within:
                size = "{}x{}".format(*resize_map.original)
                yield f"its {role} {list(values)} ({target.coordinate_system}) leaves the image of {size} pixels"
