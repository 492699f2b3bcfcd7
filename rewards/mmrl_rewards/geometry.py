"""Coordinates and boxes for rewards: validated, and converted to px_original by the resize map of their image.

A box is (x1, y1, x2, y2) with x1 < x2 and y1 < y2. Coordinates are continuous: a side is x2 - x1, never x2 - x1 + 1,
so boxes in fractions of the image are measured like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Final

from pydantic import Field

from mmrl.answer import validate_value
from mmrl.types import AnswerType, CoordinateSystem, Region, ResizeMap, Response, Sample, Unscorable

Share = Annotated[float, Field(gt=0.0, le=1.0)]
"""A fraction, such as of an image's diagonal."""
Threshold = Annotated[float, Field(gt=0.0, le=1.0)]
"""Overlap, a fraction, at and above which an answer is correct."""
Thresholds = Annotated[tuple[Threshold, ...], Field(min_length=1)]
COCO_THRESHOLDS: Final = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
"""The thresholds over which the COCO benchmark averages."""


def resize_map(response: Response, sample: Sample, media_index: int | None = None) -> ResizeMap:
    """Return the resize map of image or video number `media_index`, from 0; None means the one the target lies in.

    Raises:
        Unscorable: the sample has no such image or video.
    """
    index = sample.target.media_index if media_index is None else media_index
    if not 0 <= index < len(response.resize_maps):
        raise Unscorable(f"the target belongs to medium {index}, and the sample has {len(response.resize_maps)}")
    return response.resize_maps[index]


def target_to_pixels(
    response: Response, sample: Sample, values: Sequence[float], media_index: int | None = None
) -> tuple[float, ...]:
    """Return coordinates of the target, x, y, x, y, ..., in px_original of image or video number `media_index`.

    Raises:
        Unscorable: the sample has no such image or video, or the target does not name its coordinate system.
    """
    resize, source = resize_map(response, sample, media_index), sample.target.coordinate_system
    if source is None:
        target = f"{sample.target.value!r:.80}"
        raise Unscorable(f"the target {target} does not name the coordinate system of its coordinates")
    return resize.convert(values, source, CoordinateSystem.PX_ORIGINAL)


def answer_to_pixels(
    response: Response, sample: Sample, values: Sequence[float], media_index: int | None = None
) -> tuple[float, ...]:
    """Return coordinates of the response, x, y, x, y, ..., in px_original of image or video number `media_index`.

    Raises:
        Unscorable: the sample has no such image or video.
    """
    resize = resize_map(response, sample, media_index)
    return resize.convert(values, response.coordinate_system, CoordinateSystem.PX_ORIGINAL)


def region_coordinates(regions: Sequence[Region]) -> list[float]:
    """Return the coordinates of all regions, one after the other, to be converted by one call."""
    return [*chain.from_iterable(region.coordinates for region in regions)]


def parse_box(values: object) -> tuple[float, ...]:
    """Return a box from parsed JSON.

    Raises:
        ValueError: the value is not four finite numbers with x1 < x2 and y1 < y2.
    """
    try:
        box: tuple[float, ...] = validate_value(AnswerType.BOX, values)
    except ValueError as error:
        raise ValueError(f"{values!r:.80} is {error}") from error
    return box


def area(box: Sequence[float]) -> float:
    """Return width times height of a box."""
    return (box[2] - box[0]) * (box[3] - box[1])


def _shared_and_covered(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Return the areas of the intersection and of the union of two boxes."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = width * height if width > 0.0 and height > 0.0 else 0.0
    return shared, area(a) + area(b) - shared


def enclosing_box(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float, float]:
    """Return the smallest box that contains both boxes."""
    return min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])


def iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Return |A & B| / |A | B| of two boxes, in [0, 1]."""
    shared, covered = _shared_and_covered(a, b)
    return shared / covered


def giou(a: Sequence[float], b: Sequence[float]) -> float:
    """Return IoU - (1 - |A | B| / |C|), where C is the smallest box around A and B, in (-1, 1]."""
    shared, covered = _shared_and_covered(a, b)
    return shared / covered - (1.0 - covered / area(enclosing_box(a, b)))


def diou(a: Sequence[float], b: Sequence[float]) -> float:
    """Return IoU - d^2 / c^2, in (-1, 1]: d is the distance of the centres, c the diagonal of the box around both."""
    x1, y1, x2, y2 = enclosing_box(a, b)
    dx, dy = (a[0] + a[2] - b[0] - b[2]) / 2, (a[1] + a[3] - b[1] - b[3]) / 2
    return iou(a, b) - (dx**2 + dy**2) / ((x2 - x1) ** 2 + (y2 - y1) ** 2)


def point_in_box(point: Sequence[float], box: Sequence[float]) -> bool:
    """Return True if a point lies in a box, edges included."""
    return bool(box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3])


def point_in_region(point: Sequence[float], polygons: Sequence[Sequence[Sequence[float]]]) -> bool:
    """Return True if a ray from the point to the right crosses the polygons' outlines an odd number of times."""
    x, y = point
    inside = False
    for polygon in polygons:
        for (x1, y1), (x2, y2) in zip(polygon, [*polygon[1:], polygon[0]], strict=True):
            # Half open in y, so that a ray through a vertex crosses only one of its two sides.
            if (y1 > y) != (y2 > y) and x < x1 + (y - y1) / (y2 - y1) * (x2 - x1):
                inside = not inside
    return inside


def format_coordinates(values: Sequence[float]) -> str:
    """Return coordinates in whole pixels, for the reason of a reward."""
    return str([*map(round, values)])


def format_pair(answer: Sequence[float], target: Sequence[float]) -> str:
    """Return the coordinates of answer and target in whole pixels, for the reason of a reward."""
    return f"{format_coordinates(answer)} vs {format_coordinates(target)} px_original"
