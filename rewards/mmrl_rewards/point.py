"""Rewards for pointing. Distances are measured in px_original, as shares of the picture's diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, hypot
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from mmrl.answer import validate_value
from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import geometry, matching
from mmrl_rewards.contract import reward, target_value

Share = Annotated[float, Field(gt=0.0, le=1.0)]


@reward(name="point_in_box", answer_types=(AnswerType.POINT, AnswerType.BOX))
def in_box(response: Response, sample: Sample, *, column: str = "box") -> RewardValue:
    """1 if the answer's point lies in the right box, edges included, else 0.

    A target of kind `point` has its box in `sample.meta[column]`, in the target's frame. A target of kind `box` is
    answered with a box, whose centre is the point. Source: ScreenSpot's click accuracy (arXiv:2401.10935).
    Departures: none; mind that the centre of a picture is the centre of a box around all of it.

    Raises:
        Unscorable: there is no box of four finite numbers with x1 < x2, y1 < y2, no frame or no medium.
    """
    corners = (
        target_value(sample, AnswerType.BOX)
        if sample.target.answer_type is AnswerType.BOX
        else _parse_box(_read_column(sample, AnswerType.POINT, column))
    )
    resize, frame = geometry.resize_map(response, sample), geometry.target_coordinate_system(sample)
    x1, y1, x2, y2 = geometry.to_pixels(resize, corners, frame)
    if response.answer.value is None:
        return RewardValue(0.0, response.answer.problems[0])
    point = geometry.to_pixels(resize, response.answer.value, response.coordinate_system)
    x, y = point if len(point) == 2 else ((point[0] + point[2]) / 2, (point[1] + point[3]) / 2)
    hit = x1 <= x <= x2 and y1 <= y <= y2
    target_box = geometry.format_coordinates((x1, y1, x2, y2))
    reason = f"{geometry.format_coordinates((x, y))} {'in' if hit else 'not in'} {target_box} px_original"
    return RewardValue(float(hit), reason)


@reward(name="point_distance", answer_types=(AnswerType.POINT,))
def distance(
    response: Response, sample: Sample, *, falloff: Literal["gaussian", "linear"] = "gaussian", scale: Share = 0.05
) -> RewardValue:
    """exp(-d^2 / (2 scale^2)) or max(0, 1 - d / scale), d the distance to the target over the picture's diagonal.

    Source: the Gaussian point reward of GUI-G2 (arXiv:2507.15846). Departures: one fixed scale, since a target point
    has no size of its own; the linear form is this library's.

    Raises:
        Unscorable: the target is not two finite numbers, or has no frame or no medium.
    """
    resize, frame = geometry.resize_map(response, sample), geometry.target_coordinate_system(sample)
    target = geometry.to_pixels(resize, target_value(sample, AnswerType.POINT), frame)
    if response.answer.value is None:
        return RewardValue(0.0, response.answer.problems[0])
    point = geometry.to_pixels(resize, response.answer.value, response.coordinate_system)
    d = hypot(point[0] - target[0], point[1] - target[1]) / hypot(*resize.original)
    value = exp(-((d / scale) ** 2) / 2) if falloff == "gaussian" else max(0.0, 1.0 - d / scale)
    return RewardValue(
        value, f"{d:.1%} off: {geometry.format_coordinates(point)} vs {geometry.format_coordinates(target)} px_original"
    )


@reward(name="points_f1", answer_types=(AnswerType.POINTS,))
def f1(response: Response, sample: Sample, *, radius: Share = 0.025) -> RewardValue:
    """2 matched / (answers + targets), matched one to one, same label, at most `radius` of the diagonal apart.

    Source: the Hungarian-matched points of VisionReasoner (arXiv:2505.12081), 30 px on 840 x 840, which is 0.025.
    Departures: as many pairs as can be are matched, and each point too many or too few costs, as F1 does; a target
    without a label takes any. No points at all are right where there are none.

    Raises:
        Unscorable: the target is not a list of points of two finite numbers, or has no frame or no medium.
    """
    targets = target_value(sample, AnswerType.POINTS)
    resize, frame = geometry.resize_map(response, sample), geometry.target_coordinate_system(sample)
    expected = geometry.regions_to_pixels(resize, targets, frame)
    answers = response.answer.value
    if answers is None:
        return RewardValue(0.0, response.answer.problems[0])
    given = geometry.regions_to_pixels(resize, answers, response.coordinate_system)
    near = _pairwise_distances(given, expected) <= radius * hypot(*resize.original)
    labels = matching.match_labels([answer.label for answer in answers], [target.label for target in targets])
    found = matching.match_one_to_one((near & labels).astype(np.float64))
    return RewardValue(found.f1, f"F1 {found.f1:.2f}: {found.summary}")


@reward(name="points_in_region", answer_types=(AnswerType.POINTS,))
def in_region(response: Response, sample: Sample, *, column: str = "region") -> RewardValue:
    """The share of the answer's points that lie inside a region: polygons, in `sample.meta[column]`.

    The region is a list of polygons, each a list of [x, y] in the target's frame, such as the outline of a mask; a
    point is inside if it is inside an odd number of them, so an inner outline cuts a hole. Source: the accuracy of
    RoboPoint (arXiv:2406.10721) on affordances. Departures: polygons instead of pixel masks; equal points count
    once, so that repeating a sure one is no way to outweigh the others.

    Raises:
        Unscorable: the target is of another kind, there is no such region, or no frame or no medium.
    """
    polygons = _parse_polygons(_read_column(sample, AnswerType.POINTS, column))
    resize, frame = geometry.resize_map(response, sample), geometry.target_coordinate_system(sample)
    region = [[geometry.to_pixels(resize, vertex, frame) for vertex in polygon] for polygon in polygons]
    if response.answer.value is None:
        return RewardValue(0.0, response.answer.problems[0])
    points = set(geometry.regions_to_pixels(resize, response.answer.value, response.coordinate_system))
    inside = sum(sum(geometry.point_in_polygon(point, polygon) for polygon in region) % 2 for point in points)
    return RewardValue(inside / len(points) if points else 0.0, f"{inside} of {len(points)} points inside the region")


def _read_column(sample: Sample, answer_type: AnswerType, column: str) -> object:
    """What the sample's row says beside its target, which must be of this kind."""
    target_value(sample, answer_type)
    if column not in sample.meta:
        raise Unscorable(f"the sample has no column {column!r}; it has {', '.join(map(repr, sample.meta)) or 'none'}")
    return sample.meta[column]


def _parse_box(corners: object) -> tuple[float, ...]:
    try:
        return geometry.parse_box(corners)
    except ValueError as error:
        raise Unscorable(f"the column {error}") from error


def _parse_polygons(region: object) -> list[list[tuple[float, ...]]]:
    if not isinstance(region, list | tuple) or not region:
        raise Unscorable(f"the region {region!r:.80} is not a list of polygons")
    for polygon in region:
        if not isinstance(polygon, list | tuple) or len(polygon) < 3:
            raise Unscorable(f"the polygon {polygon!r:.80} is not a list of three points or more")
    try:
        return [[validate_value(AnswerType.POINT, vertex) for vertex in polygon] for polygon in region]
    except ValueError as error:
        raise Unscorable(f"the region {region!r:.80} has a vertex that is {error}") from error


def _pairwise_distances(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> matching.Matrix:
    """Euclidean distance of every point of `a` to every point of `b`."""
    left = np.asarray(a, dtype=np.float64).reshape(-1, 1, 2)
    right = np.asarray(b, dtype=np.float64).reshape(1, -1, 2)
    offsets = left - right
    return np.hypot(offsets[..., 0], offsets[..., 1])
