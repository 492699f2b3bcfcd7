"""MEGA-Bench's metrics of boxes, points and other quantities that may be near; sources as in `megabench_metrics`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from mmrl.benchmarks.extraction.coordinates import find_boxes
from mmrl.benchmarks.official.megabench_values import MAX_FIELD_CHARS, parse_entries, parse_numbers, to_text
from mmrl_rewards import geometry

_POINT_TAG: Final = re.compile(r"<point>([^<]{1,80})</point>")
_BOX_TAG: Final = re.compile(r"<(/?)box>")
_KEYPOINT_DECAY: Final = 10.0 / math.sqrt(2.0)
_MAX_NUMBER_ERROR: Final = 0.1
_MAX_ANGLE_ERROR: Final = 10.0  # degrees
_MAX_MAGNITUDE: Final = 1e9


def _parse_boxes(value: object) -> list[tuple[float, ...]]:
    return [
        box for box, _ in find_boxes(_BOX_TAG.sub(lambda tag: ")" if tag[1] else "(", to_text(value)[:MAX_FIELD_CHARS]))
    ]


def _ordered_iou(predicted_box: Sequence[float], reference_box: Sequence[float]) -> float:
    ordered = all(box[0] < box[2] and box[1] < box[3] for box in (predicted_box, reference_box))
    return geometry.iou(tuple(predicted_box), tuple(reference_box)) if ordered else 0.0


def first_box_iou(prediction: object, reference: object) -> float:
    """IoU of the first box of each."""
    ours, theirs = _parse_boxes(prediction), _parse_boxes(reference)
    return _ordered_iou(ours[0], theirs[0]) if ours and theirs else 0.0


def mean_best_iou(prediction: object, reference: object) -> float:
    """The mean over the boxes given of the best IoU with a right one."""
    ours, theirs = _parse_boxes(prediction), _parse_boxes(reference)
    return fmean(max(_ordered_iou(box, other) for other in theirs) for box in ours) if ours and theirs else 0.0


def mean_pairwise_iou(prediction: object, reference: object) -> float:
    """The mean IoU of boxes in turn, as many as are due."""
    ours, theirs = _parse_boxes(prediction), _parse_boxes(reference)
    if len(ours) != len(theirs) or not ours:
        return 0.0
    return fmean(_ordered_iou(box, other) for box, other in zip(ours, theirs, strict=True))


def is_point_in_any_box(prediction: object, reference: object) -> float:
    """The one point in tags lies in a box, of the context or of the answer."""
    point = _parse_point(prediction)
    boxes = _parse_boxes(
        " ".join(map(to_text, reference["bounding_boxes"])) if isinstance(reference, Mapping) else reference
    )
    return float(bool(point) and any(x1 <= point[0] <= x2 and y1 <= point[1] <= y2 for x1, y1, x2, y2 in boxes))


def point_closeness(prediction: object, reference: object) -> float:
    """1 - the distance of the one point in tags from the right one, both in fractions of the picture; at least 0."""
    ours, theirs = _parse_point(prediction), _parse_point(reference)
    if not (ours and theirs) or not all(0.0 <= side <= 1.0 for side in (*ours, *theirs)):
        return 0.0
    return max(0.0, 1.0 - math.dist(ours, theirs))


def keypoint_similarity(prediction: object, reference: object) -> float:
    """The mean of exp(-10 d / sqrt 2) over points in turn, d their distance; of as many points as are due."""
    ours, theirs = _parse_pairs(prediction), _parse_pairs(reference)
    if len(ours) != len(theirs) or not ours:
        return 0.0
    return fmean(math.exp(-_KEYPOINT_DECAY * math.dist(a, b)) for a, b in zip(ours, theirs, strict=True))


def number_closeness(prediction: object, reference: object) -> float:
    """1 - |a - b| / 0.1, at least 0: the root of one squared error, as MEGA-Bench has it."""
    ours, theirs = parse_numbers(prediction), parse_numbers(reference)
    return max(0.0, 1.0 - abs(ours[0] - theirs[0]) / _MAX_NUMBER_ERROR) if ours and theirs else 0.0


def angle_closeness(prediction: object, reference: object) -> float:
    """1 - the mean of |a - b| / 10 degrees over numbers in turn, at least 0; of as many numbers as are due."""
    ours, theirs = (
        [entry for entry in parse_entries(value) if _is_bounded_number(entry)] for value in (prediction, reference)
    )
    if len(ours) != len(parse_entries(prediction)) or len(ours) != len(theirs) or not ours:
        return 0.0
    far = fmean(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    return max(0.0, 1.0 - far / _MAX_ANGLE_ERROR)


def _parse_point(value: object) -> tuple[float, ...]:
    """The one point in tags; nothing where there are several, or none."""
    found = _POINT_TAG.findall(to_text(value)[:MAX_FIELD_CHARS])
    point = tuple(parse_numbers(found[0])) if len(found) == 1 else ()
    return point if len(point) == 2 else ()


def _parse_pairs(value: object) -> list[tuple[float, float]]:
    """The entries of a list that are two numbers."""
    return [
        (float(entry[0]), float(entry[1]))
        for entry in parse_entries(value)
        if isinstance(entry, tuple) and len(entry) == 2 and all(map(_is_bounded_number, entry))
    ]


def _is_bounded_number(value: object) -> bool:
    """Whether it is a number that one can reckon with: neither NaN nor beyond all pictures and angles."""
    return isinstance(value, int | float) and -_MAX_MAGNITUDE < value < _MAX_MAGNITUDE
