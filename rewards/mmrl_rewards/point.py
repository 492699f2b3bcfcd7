"""Rewards for points. Distances are measured in px_original, as fractions of the image's diagonal."""

from __future__ import annotations

from math import exp, hypot
from typing import Literal

import numpy as np

from mmrl.answer import validate_value
from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import geometry, matching
from mmrl_rewards.contract import answer_value, column_value, reward, target_value
from mmrl_rewards.geometry import Share


@reward(name="point_in_box", answer_types=(AnswerType.POINT, AnswerType.BOX))
def in_box(response: Response, sample: Sample, *, column: str = "box") -> RewardValue:
    """Return 1 if the answer's point lies in the target's box, edges included, else 0.

    For a target of type `point`, the box is in `sample.meta[column]`, in the target's coordinate system. A target of
    type `box` is answered with a box, whose centre is the point.

    Source: ScreenSpot's click accuracy (arXiv:2401.10935).
    Departures: none. A box around the whole image counts as a click on the image's centre.
    Unscorable: there is no box of four finite numbers with x1 < x2 and y1 < y2, or the target has no coordinate system,
    or its image or video does not exist.
    """
    if sample.target.answer_type is AnswerType.BOX:
        corners = target_value(sample, AnswerType.BOX)
    else:
        target_value(sample, AnswerType.POINT)  # only its type counts
        try:
            corners = geometry.parse_box(column_value(sample, column))
        except ValueError as error:
            raise Unscorable(f"the column {error}") from error
    box = geometry.target_to_pixels(response, sample, corners)
    point = geometry.answer_to_pixels(response, sample, answer_value(response))
    if len(point) == 4:
        point = ((point[0] + point[2]) / 2, (point[1] + point[3]) / 2)
    hit = geometry.point_in_box(point, box)
    place = f"{'in' if hit else 'not in'} {geometry.format_coordinates(box)} px_original"
    reason = f"{geometry.format_coordinates(point)} {place}"
    return RewardValue(float(hit), reason)


@reward(name="point_distance", answer_types=(AnswerType.POINT,))
def distance(
    response: Response, sample: Sample, *, falloff: Literal["gaussian", "linear"] = "gaussian", scale: Share = 0.05
) -> RewardValue:
    """Return exp(-d^2 / (2 scale^2)), or max(0, 1 - d / scale) if `falloff` is linear, in [0, 1].

    d is the distance to the target over the image's diagonal.

    Source: the Gaussian point reward of GUI-G2 (arXiv:2507.15846).
    Departures: the scale is fixed, because a target point has no size. The linear form is this library's own.
    Unscorable: the target is not two finite numbers, or it has no coordinate system, or its image or video does not
    exist.
    """
    target = geometry.target_to_pixels(response, sample, target_value(sample, AnswerType.POINT))
    point = geometry.answer_to_pixels(response, sample, answer_value(response))
    diagonal = hypot(*geometry.resize_map(response, sample).original)
    d = hypot(point[0] - target[0], point[1] - target[1]) / diagonal
    value = exp(-((d / scale) ** 2) / 2) if falloff == "gaussian" else max(0.0, 1.0 - d / scale)
    return RewardValue(value, f"{d:.1%} off: {geometry.format_pair(point, target)}")


@reward(name="points_f1", answer_types=(AnswerType.POINTS,))
def f1(response: Response, sample: Sample, *, radius: Share = 0.025) -> RewardValue:
    """Return 2 matched / (answers + targets), in [0, 1], over a one-to-one matching of points.

    Two points can match if their labels agree and they are at most `radius` of the image's diagonal apart. A target
    without a label matches any label. If the target has no points, an empty answer earns 1.

    Source: the Hungarian-matched points of VisionReasoner (arXiv:2505.12081), 30 px on 840 x 840, which is 0.025.
    Departures: the number of matched pairs is maximised, and F1 makes superfluous and missing points cost.
    Unscorable: the target is not a list of points of two finite numbers, or it has no coordinate system, or its image
    or video does not exist.
    """
    targets = target_value(sample, AnswerType.POINTS)
    target_points = geometry.target_to_pixels(response, sample, geometry.region_coordinates(targets))
    answers = answer_value(response)
    answer_points = geometry.answer_to_pixels(response, sample, geometry.region_coordinates(answers))
    # [answers, targets, 2]
    offsets = np.reshape(answer_points, (-1, 1, 2)) - np.reshape(target_points, (1, -1, 2))
    diagonal = hypot(*geometry.resize_map(response, sample).original)
    near = np.hypot(offsets[..., 0], offsets[..., 1]) <= radius * diagonal
    labels = matching.match_labels([answer.label for answer in answers], [target.label for target in targets])
    matched = matching.match_one_to_one((near & labels).astype(np.float64))
    return RewardValue(matched.f1, f"F1 {matched.f1:.2f}: {matched.summary}")


@reward(name="points_in_region", answer_types=(AnswerType.POINTS,))
def in_region(response: Response, sample: Sample, *, column: str = "region") -> RewardValue:
    """Return the fraction of the answer's points that lie inside the region in `sample.meta[column]`.

    The region is a list of polygons, each a list of [x, y] in the target's coordinate system, such as the outline of a
    mask. A point is inside if an odd number of polygons contain it, so an inner outline cuts a hole.

    Source: the accuracy of RoboPoint (arXiv:2406.10721) on affordances.
    Departures: the region is polygons instead of a pixel mask. Equal points count once, because otherwise repeating a
    safe point would outweigh the others.
    Unscorable: the target has another type, there is no such region, the target has no coordinate system, or its image
    or video does not exist.
    """
    target_value(sample, AnswerType.POINTS)  # only its type counts
    polygons = _parse_polygons(column_value(sample, column))
    region = []
    for polygon in polygons:
        region.append([geometry.target_to_pixels(response, sample, vertex) for vertex in polygon])
    numbers = geometry.answer_to_pixels(response, sample, geometry.region_coordinates(answer_value(response)))
    points = set(zip(numbers[::2], numbers[1::2], strict=True))
    inside = sum(geometry.point_in_region(point, region) for point in points)
    return RewardValue(inside / len(points) if points else 0.0, f"{inside} of {len(points)} points inside the region")


def _parse_polygons(region: object) -> list[list[tuple[float, ...]]]:
    """Return the polygons of a region, each a list of three (x, y) or more."""
    if not isinstance(region, list | tuple) or not region:
        raise Unscorable(f"the region {region!r:.80} is not a list of polygons")
    polygons = []
    for polygon in region:
        if not isinstance(polygon, list | tuple) or len(polygon) < 3:
            raise Unscorable(f"the polygon {polygon!r:.80} is not a list of three points or more")
        try:
            polygons.append([validate_value(AnswerType.POINT, vertex) for vertex in polygon])
        except ValueError as error:
            raise Unscorable(f"the region {region!r:.80} has a vertex that is {error}") from error
    return polygons
