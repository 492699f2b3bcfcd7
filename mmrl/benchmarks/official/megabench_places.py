"""MEGA-Bench's metrics of boxes, points and other quantities that may be near; sources as in `megabench_metrics`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from mmrl.benchmarks.extraction.coordinates import boxes_in
from mmrl.benchmarks.official.megabench_values import LONGEST, as_text, entries_in, figures_in
from mmrl_rewards import geometry

_POINT: Final = re.compile(r"<point>([^<]{1,80})</point>")
_TAGS: Final = re.compile(r"<(/?)box>")
_SPREAD: Final = 10.0 / math.sqrt(2.0)
_FARTHEST: Final = 0.1
_WIDEST: Final = 10.0  # degrees
_LARGEST: Final = 1e9


def _boxes(value: object) -> list[tuple[float, ...]]:
    return [box for box, _ in boxes_in(_TAGS.sub(lambda tag: ")" if tag[1] else "(", as_text(value)[:LONGEST]))]


def _iou(ours: Sequence[float], theirs: Sequence[float]) -> float:
    ordered = all(box[0] < box[2] and box[1] < box[3] for box in (ours, theirs))
    return geometry.iou(tuple(ours), tuple(theirs)) if ordered else 0.0


def overlap(said: object, due: object) -> float:
    """IoU of the first box of each."""
    ours, theirs = _boxes(said), _boxes(due)
    return _iou(ours[0], theirs[0]) if ours and theirs else 0.0


def overlaps(said: object, due: object) -> float:
    """The mean over the boxes given of the best IoU with a right one."""
    ours, theirs = _boxes(said), _boxes(due)
    return fmean(max(_iou(box, other) for other in theirs) for box in ours) if ours and theirs else 0.0


def tracked(said: object, due: object) -> float:
    """The mean IoU of boxes in turn, as many as are due."""
    ours, theirs = _boxes(said), _boxes(due)
    if len(ours) != len(theirs) or not ours:
        return 0.0
    return fmean(_iou(box, other) for box, other in zip(ours, theirs, strict=True))


def pointed(said: object, due: object) -> float:
    """The one point in tags lies in a box, of the context or of the answer."""
    point = _point(said)
    boxes = _boxes(" ".join(map(as_text, due["bounding_boxes"])) if isinstance(due, Mapping) else due)
    return float(bool(point) and any(x1 <= point[0] <= x2 and y1 <= point[1] <= y2 for x1, y1, x2, y2 in boxes))


def point_distance(said: object, due: object) -> float:
    """1 - the distance of the one point in tags from the right one, both in fractions of the picture; at least 0."""
    ours, theirs = _point(said), _point(due)
    if not (ours and theirs) or not all(0.0 <= side <= 1.0 for side in (*ours, *theirs)):
        return 0.0
    return max(0.0, 1.0 - math.dist(ours, theirs))


def keypoints(said: object, due: object) -> float:
    """The mean of exp(-10 d / sqrt 2) over points in turn, d their distance; of as many points as are due."""
    ours, theirs = _pairs(said), _pairs(due)
    if len(ours) != len(theirs) or not ours:
        return 0.0
    return fmean(math.exp(-_SPREAD * math.dist(a, b)) for a, b in zip(ours, theirs, strict=True))


def near_number(said: object, due: object) -> float:
    """1 - |a - b| / 0.1, at least 0: the root of one squared error, as MEGA-Bench has it."""
    ours, theirs = figures_in(said), figures_in(due)
    return max(0.0, 1.0 - abs(ours[0] - theirs[0]) / _FARTHEST) if ours and theirs else 0.0


def near_angles(said: object, due: object) -> float:
    """1 - the mean of |a - b| / 10 degrees over numbers in turn, at least 0; of as many numbers as are due."""
    ours, theirs = ([entry for entry in entries_in(value) if _is_number(entry)] for value in (said, due))
    if len(ours) != len(entries_in(said)) or len(ours) != len(theirs) or not ours:
        return 0.0
    far = fmean(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    return max(0.0, 1.0 - far / _WIDEST)


def _point(value: object) -> tuple[float, ...]:
    """The one point in tags; nothing where there are several, or none."""
    found = _POINT.findall(as_text(value)[:LONGEST])
    point = tuple(figures_in(found[0])) if len(found) == 1 else ()
    return point if len(point) == 2 else ()


def _pairs(value: object) -> list[tuple[float, float]]:
    """The entries of a list that are two numbers."""
    return [
        (float(entry[0]), float(entry[1]))
        for entry in entries_in(value)
        if isinstance(entry, tuple) and len(entry) == 2 and all(map(_is_number, entry))
    ]


def _is_number(value: object) -> bool:
    """Whether it is a number that one can reckon with: neither NaN nor beyond all pictures and angles."""
    return isinstance(value, int | float) and -_LARGEST < value < _LARGEST
