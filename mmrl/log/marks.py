"""Boxes, points and spans of recorded answers and targets, as marks on the picture that the model saw."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmrl.answer.values import AnswerValue, list_coordinates
from mmrl.log.rollout_records import BAD_VALUE, parse_resize_map
from mmrl.types import Action, AnswerType, CoordinateSystem, ResizeMap


def record_marks(record: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the marks of the `target` or the `answer` of a recorded rollout, on the medium of the target."""
    frame = record.get("target_frame" if key == "target" else "frame")
    media, medium = record.get("media"), record.get("media_index") or 0
    # A sample of text alone has answers, too, and no medium.
    resize_map = parse_resize_map(media[medium]) if isinstance(media, list) and 0 <= medium < len(media) else None
    return make_marks(record.get("answer_type") or "", record.get(key), frame, medium, resize_map)


def make_marks(
    answer_type: str, value: object, frame: str | None, medium: int, resize_map: ResizeMap | None
) -> list[dict[str, Any]]:
    """Return the marks of an answer: coordinates as fractions of the medium, times in seconds of a video.

    `frame` is the coordinate system of `value`. Without it or a resize map an answer has no boxes or points; what is
    not a value of its type has no marks, since half of them would mislead.
    """
    marks = []
    try:
        for numbers, label, second in _list_regions(answer_type, value):
            at: tuple[float, ...]
            if answer_type in (AnswerType.SPAN, AnswerType.SPANS):
                start, end = numbers
                shape, at = "span", (float(start), float(end))
            elif frame is None or resize_map is None:
                continue
            else:
                at = resize_map.convert(numbers, CoordinateSystem(frame), CoordinateSystem.NORM_1)
                shape = {2: "point", 4: "box"}[len(at)]
            if all(map(math.isfinite, at)):
                marks.append({"shape": shape, "medium": medium, "at": list(at), "label": label, "second": second})
    except BAD_VALUE:
        return []
    return marks


def _list_regions(answer_type: str, value: AnswerValue) -> Iterator[tuple[Sequence[float], str, float | None]]:
    """Yield the numbers and the label of each box, point or span, and the second of a box in a track."""
    if value is None:
        return
    match answer_type:
        case AnswerType.BOX | AnswerType.POINT | AnswerType.SPAN:
            yield value, "", None
        case AnswerType.SPANS:
            for span in value:
                yield span, "", None
        case AnswerType.BOXES | AnswerType.POINTS:
            for coordinates, label, *_ in value:
                yield coordinates, str(label or ""), None
        case AnswerType.ACTION:
            name, arguments = value
            for coordinates in list_coordinates(AnswerType.ACTION, Action(name, arguments)):
                yield coordinates, str(name), None
        case AnswerType.JSON:
            for item in value if isinstance(value, list) else [value]:
                # The reward `tube` reads boxes over time as a list of objects with `time` and `bbox_2d`.
                time = item.get("time") if isinstance(item, dict) else None
                second = float(time) if isinstance(time, int | float) else None
                for coordinates in list_coordinates(AnswerType.JSON, item):
                    yield coordinates, "", second
