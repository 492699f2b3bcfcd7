"""Boxes, points and spans of answers, as marks on the picture that the model saw."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmrl.answer.values import AnswerValue, list_coordinates
from mmrl.types import Action, AnswerType, CoordinateSystem, ResizeMap, Size

# What arithmetic on the values of a damaged or hostile record may raise.
BAD_VALUE = (TypeError, ValueError, IndexError, KeyError, AttributeError, OverflowError, ZeroDivisionError)


def parse_resize_map(medium: Mapping[str, Any]) -> ResizeMap | None:
    """Return the resize map of a recorded medium, None if it has none that can be used."""
    try:
        original, resized = Size(*map(int, medium["original"])), Size(*map(int, medium["resized"]))
        left, top = map(int, medium.get("offset") or (0, 0))
    except BAD_VALUE:
        return None
    return ResizeMap(original, resized, (left, top)) if min(*original, *resized) > 0 else None


def make_marks(
    answer_type: str, value: object, frame: str | None, medium: int, resize_map: ResizeMap | None
) -> list[dict[str, Any]]:
    """Return the marks of an answer: coordinates as fractions of the medium, spans in seconds.

    `frame` is the coordinate system of `value`. Without it or a resize map an answer has no boxes or points; what is
    not a value of its type has no marks.
    """
    marks = []
    try:
        for start, end in _list_spans(answer_type, value):
            marks.append({"shape": "span", "medium": medium, "at": [start, end], "label": "", "frame": None})
        if frame is None or resize_map is None:
            return marks
        system = CoordinateSystem(frame)
        for coordinates, label in _list_regions(answer_type, value):
            at = resize_map.convert(coordinates, system, CoordinateSystem.NORM_1)
            if len(at) not in (2, 4) or not all(map(math.isfinite, at)):
                continue
            shape = "point" if len(at) == 2 else "box"
            marks.append({"shape": shape, "medium": medium, "at": list(at), "label": label, "frame": None})
    except BAD_VALUE:
        # The answer is shown as text beside; half of its marks would mislead.
        return []
    return marks


def crop_fractions(crop: object, resize_map: ResizeMap | None) -> list[float] | None:
    """Return a crop (left, top, right, bottom, in pixels of the file) as fractions of the medium."""
    if not isinstance(crop, list) or resize_map is None:
        return None
    marks = make_marks(AnswerType.BOX, crop, CoordinateSystem.PX_ORIGINAL, 0, resize_map)
    return marks[0]["at"] if marks else None


def _list_spans(answer_type: str, value: AnswerValue) -> Iterator[tuple[float, float]]:
    if answer_type in (AnswerType.SPAN, AnswerType.SPANS) and value is not None:
        for start, end in [value] if answer_type == AnswerType.SPAN else value:
            yield float(start), float(end)


def _list_regions(answer_type: str, value: AnswerValue) -> Iterator[tuple[Sequence[float], str]]:
    """Yield coordinates and label of each box or point."""
    if value is None:
        return
    match answer_type:
        case AnswerType.BOX | AnswerType.POINT:
            yield value, ""
        case AnswerType.BOXES | AnswerType.POINTS:
            for coordinates, label, *_ in value:
                yield coordinates, str(label or "")
        case AnswerType.ACTION:
            name, arguments = value
            for coordinates in list_coordinates(AnswerType.ACTION, Action(name, arguments)):
                yield coordinates, str(name)
        case AnswerType.JSON:
            for coordinates in list_coordinates(AnswerType.JSON, value):
                yield coordinates, ""
