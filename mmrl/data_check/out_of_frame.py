"""Coordinates that leave their picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Final

from mmrl.types import AnswerType, CoordinateSystem, ResizeMap, Sample, Target

TOLERANCE_PX: Final = 1.0  # annotations that count pixels from 1, or round up, are off by one at the far edges


def target_coordinates(target: Target) -> tuple[tuple[float, ...], ...]:
    """The boxes or points of an answer, as x, y, ...; none of other kinds."""
    match target.answer_type:
        case AnswerType.BOX | AnswerType.POINT:
            return (tuple(target.value),)
        case AnswerType.BOXES | AnswerType.POINTS:
            return tuple(tuple(region.coordinates) for region in target.value)
    return ()


def find_out_of_frame(sample: Sample, resizes: Sequence[ResizeMap]) -> Iterator[str]:
    """What of a sample's answer and label lies outside its picture, by more than `SLACK_PX` pixels of the original."""
    for role, target in (("answer", sample.target), ("label", sample.label)):
        if target is None or target.coordinate_system is None:
            continue
        if target.media_index >= len(resizes):
            yield f"its {role} lies in medium {target.media_index} (counted from 0), and it has {len(resizes)}"
            continue
        resize = resizes[target.media_index]
        for values in target_coordinates(target):
            if not _is_within(resize.convert(values, target.coordinate_system, CoordinateSystem.PX_ORIGINAL), resize):
                size = "{}x{}".format(*resize.original)
                yield f"its {role} {list(values)} ({target.coordinate_system}) leaves the picture of {size} pixels"


def _is_within(values: Sequence[float], resize: ResizeMap) -> bool:
    return all(
        isfinite(value) and -TOLERANCE_PX <= value <= resize.original[index % 2] + TOLERANCE_PX
        for index, value in enumerate(values)
    )
