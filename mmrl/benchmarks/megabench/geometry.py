"""MEGA-Bench's metrics of boxes, points, keypoints, numbers and angles, where a near miss scores something.

Source: as `metrics.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from mmrl.benchmarks.extraction.coordinates import find_boxes
from mmrl.benchmarks.extraction.fields import MAX_FIELD_CHARS
from mmrl.benchmarks.megabench.field_values import parse_entries, parse_numbers, to_text
from mmrl_rewards import geometry

_POINT_TAG: Final = re.compile(r"<point>([^<]{1,80})</point>")
_BOX_TAG: Final = re.compile(r"<(/?)box>")
_KEYPOINT_DECAY: Final = 10.0 / math.sqrt(2.0)
_MAX_NUMBER_ERROR: Final = 0.1
_MAX_ANGLE_ERROR: Final = 10.0
"""Degrees."""
_MAX_MAGNITUDE: Final = 1e9
"""Largest coordinate or angle that is taken seriously; it keeps infinities out of the sums."""


def first_box_iou(prediction: object, reference: object) -> float:
    """Return the IoU of the first box of each."""
    predicted, expected = _parse_boxes(prediction), _parse_boxes(reference)
    return _ordered_iou(predicted[0], expected[0]) if predicted and expected else 0.0


def mean_best_iou(prediction: object, reference: object) -> float:
    """Return the mean over predicted boxes of the best IoU with any reference box."""
    predicted, expected = _parse_boxes(prediction), _parse_boxes(reference)
    if not (predicted and expected):
        return 0.0
    best_ious = []
    for box in predicted:
        best_ious.append(max(_ordered_iou(box, target) for target in expected))
    return fmean(best_ious)


def mean_pairwise_iou(prediction: object, reference: object) -> float:
    """Return the mean IoU of boxes paired by their order; 0 when there are not equally many."""
    predicted, expected = _parse_boxes(prediction), _parse_boxes(reference)
    if len(predicted) != len(expected) or not predicted:
        return 0.0
    return fmean(_ordered_iou(box, target) for box, target in zip(predicted, expected, strict=True))


def is_point_in_any_box(prediction: object, reference: object) -> float:
    """Return 1 when the one point in tags lies in a box of the context, or of the answer."""
    point = _parse_point(prediction)
    if isinstance(reference, Mapping):
        reference = " ".join(map(to_text, reference["bounding_boxes"]))
    boxes = _parse_boxes(reference)
    return float(bool(point) and any(x1 <= point[0] <= x2 and y1 <= point[1] <= y2 for x1, y1, x2, y2 in boxes))


def point_closeness(prediction: object, reference: object) -> float:
    """Return 1 minus the distance of two points in tags, at least 0. Both are fractions of the image's sides."""
    predicted, expected = _parse_point(prediction), _parse_point(reference)
    if not (predicted and expected) or not all(0.0 <= side <= 1.0 for side in (*predicted, *expected)):
        return 0.0
    return max(0.0, 1.0 - math.dist(predicted, expected))


def keypoint_similarity(prediction: object, reference: object) -> float:
    """Return the mean of exp(-10 d / sqrt 2) over points paired by order, d their distance; 0 for unequal counts."""
    predicted, expected = _parse_pairs(prediction), _parse_pairs(reference)
    if len(predicted) != len(expected) or not predicted:
        return 0.0
    return fmean(
        math.exp(-_KEYPOINT_DECAY * math.dist(point, target)) for point, target in zip(predicted, expected, strict=True)
    )


def number_closeness(prediction: object, reference: object) -> float:
    """Return 1 - |a - b| / 0.1, at least 0. MEGA-Bench calls it an RMSE; it is that of one number."""
    predicted, expected = parse_numbers(prediction), parse_numbers(reference)
    if not (predicted and expected):
        return 0.0
    return max(0.0, 1.0 - abs(predicted[0] - expected[0]) / _MAX_NUMBER_ERROR)


def angle_closeness(prediction: object, reference: object) -> float:
    """Return 1 - the mean of |a - b| / 10 over angles in degrees paired by order, at least 0; 0 for unequal counts."""
    predicted_entries = parse_entries(prediction)
    predicted = list(filter(_is_bounded_number, predicted_entries))
    expected = list(filter(_is_bounded_number, parse_entries(reference)))
    if len(predicted) != len(predicted_entries) or len(predicted) != len(expected) or not predicted:
        return 0.0
    mean_error = fmean(abs(angle - target) for angle, target in zip(predicted, expected, strict=True))
    return max(0.0, 1.0 - mean_error / _MAX_ANGLE_ERROR)


def _parse_boxes(value: object) -> list[tuple[float, ...]]:
    text = _BOX_TAG.sub(lambda tag: ")" if tag[1] else "(", to_text(value)[:MAX_FIELD_CHARS])
    return [box for box, _ in find_boxes(text)]


def _ordered_iou(predicted_box: Sequence[float], reference_box: Sequence[float]) -> float:
    """Return the IoU of two boxes; 0 when either has its corners swapped."""
    ordered = all(box[0] < box[2] and box[1] < box[3] for box in (predicted_box, reference_box))
    return geometry.iou(tuple(predicted_box), tuple(reference_box)) if ordered else 0.0


def _parse_point(value: object) -> tuple[float, ...]:
    """Return the one point in tags; empty for none or several."""
    tags = _POINT_TAG.findall(to_text(value)[:MAX_FIELD_CHARS])
    point = tuple(parse_numbers(tags[0])) if len(tags) == 1 else ()
    return point if len(point) == 2 else ()


def _parse_pairs(value: object) -> list[tuple[float, float]]:
    """Return the entries of a list that are pairs of numbers."""
    pairs = []
    for entry in parse_entries(value):
        if isinstance(entry, tuple) and len(entry) == 2 and all(map(_is_bounded_number, entry)):
            pairs.append((float(entry[0]), float(entry[1])))
    return pairs


def _is_bounded_number(value: object) -> bool:
    """Return True for a number that is neither NaN nor larger than any image or angle."""
    return isinstance(value, int | float) and -_MAX_MAGNITUDE < value < _MAX_MAGNITUDE
