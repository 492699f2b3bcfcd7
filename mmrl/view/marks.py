"""Boxes, points and spans of answers, as marks on the picture that the model saw."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmrl.answer.values import AnswerValue, list_coordinates
from mmrl.types import Action, AnswerType, CoordinateSystem, ResizeMap, Size
from mmrl.view.records import BAD_VALUE


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
    not a value of its type has no marks, since half of them would mislead.
    """
    marks = []
    try:
        for numbers, label in _list_regions(answer_type, value):
            if answer_type in (AnswerType.SPAN, AnswerType.SPANS):
                shape, at = "span", tuple(map(float, numbers))
            elif frame is None or resize_map is None:
                continue
            else:
                at = resize_map.convert(numbers, CoordinateSystem(frame), CoordinateSystem.NORM_1)
                shape = {2: "point", 4: "box"}[len(at)]
            if all(map(math.isfinite, at)):
                marks.append({"shape": shape, "medium": medium, "at": list(at), "label": label, "frame": None})
    except BAD_VALUE:
        return []
    return marks


def _list_regions(answer_type: str, value: AnswerValue) -> Iterator[tuple[Sequence[float], str]]:
    """Yield the numbers and the label of each box, point or span."""
    if value is None:
        return
    match answer_type:
        case AnswerType.BOX | AnswerType.POINT:
            yield value, ""
        case AnswerType.SPAN | AnswerType.SPANS:
            for start, end in [value] if answer_type == AnswerType.SPAN else value:
                yield (start, end), ""
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
