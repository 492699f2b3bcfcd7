"""Coordinates that leave their picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Final

from mmrl.types import Frame, Kind, ResizeMap, Sample, Target

SLACK_PX: Final = 1.0  # annotations that count pixels from 1, or round up, are off by one at the far edges


def coordinates(target: Target) -> tuple[tuple[float, ...], ...]:
    """The boxes or points of an answer, as x, y, ...; none of other kinds."""
    match target.kind:
        case Kind.BOX | Kind.POINT:
            return (tuple(target.value),)
        case Kind.BOXES | Kind.POINTS:
            return tuple(tuple(region.coordinates) for region in target.value)
    return ()


def outside(sample: Sample, resizes: Sequence[ResizeMap]) -> Iterator[str]:
    """What of a sample's answer and label lies outside its picture, by more than `SLACK_PX` pixels of the original."""
    for role, target in (("answer", sample.target), ("label", sample.label)):
        if target is None or target.frame is None:
            continue
        if target.medium >= len(resizes):
            yield f"its {role} lies in medium {target.medium} (counted from 0), and it has {len(resizes)}"
            continue
        resize = resizes[target.medium]
        for values in coordinates(target):
            if not _lies_within(resize.convert(values, target.frame, Frame.PX_ORIGINAL), resize):
                size = "{}x{}".format(*resize.original)
                yield f"its {role} {list(values)} ({target.frame}) leaves the picture of {size} pixels"


def _lies_within(values: Sequence[float], resize: ResizeMap) -> bool:
    return all(
        isfinite(value) and -SLACK_PX <= value <= resize.original[index % 2] + SLACK_PX
        for index, value in enumerate(values)
    )
