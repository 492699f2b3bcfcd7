"""A reward for oriented boxes in space, six, seven or nine numbers each, in one frame that answer and target share.

    [x, y, z, x_size, y_size, z_size]              sides along the axes
    [x, y, z, x_size, y_size, z_size, heading]     turned about the axis `up`
    [x, y, z, x_size, y_size, z_size, a, b, c]     turned by a about x, then by b about y, then by c about z

(x, y, z) is the centre. The last form is what Qwen3-VL writes as `bbox_3d`: metres in the frame of the camera, angles
in half turns, so 0.5 is 90 degrees. Its cookbook on 3D grounding calls the angles roll, pitch and yaw where it asks
for them, and applies them about x, y and z, in this order, where it draws the box.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import cos, dist, hypot, pi, prod, radians, sin
from typing import Final, Literal, NamedTuple

import numpy as np

from mmrl.answer import is_number
from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import geometry, matching
from mmrl_rewards.contract import BadAnswer, answer_value, reward, target_value

AngleUnit = Literal["half_turns", "radians", "degrees"]
Axis = Literal["x", "y", "z"]
Vector = tuple[float, float, float]

_RADIANS: Final = {"half_turns": pi, "radians": 1.0, "degrees": radians(1.0)}
_TOLERANCE = 1e-9  # distance from a plane that still lies in it, as a fraction of the longest side of both boxes
_MAX_LENGTH = 1e9  # beyond it, the difference of two coordinates has too few digits
_MAX_SURPLUS = 10  # boxes of an answer for each of the target's


class OrientedBox(NamedTuple):
    """Holds a box in space."""

    centre: Vector
    sizes: Vector  # lengths of the sides, above 0
    axes: tuple[Vector, Vector, Vector]  # unit vectors along the sides
    label: str  # as written; empty for a box without a label

    @property
    def is_upright(self) -> bool:
        """Return True if the sides lie along the axes of the frame."""
        return self.axes == ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))


class _Face(NamedTuple):
    """Holds one face of a box. Points x inside the box have normal . x <= offset."""

    normal: Vector  # of length 1, outwards
    offset: float
    corners: list[Vector]


@reward(name="boxes3d_iou", answer_types=(AnswerType.JSON,))
def iou(
    response: Response,
    sample: Sample,
    *,
    threshold: geometry.Threshold | None = None,
    angles: AngleUnit = "half_turns",
    up: Axis = "z",
) -> RewardValue:
    """Return the mean volume IoU of the best one-to-one matching, sum(IoU) / max(answers, targets), in [0, 1].

    Answer and target are one box or a list of boxes. A box is its numbers, as the module states, or an object with them
    under `bbox_3d` and a `label`. Boxes match if their labels do: a target without a label matches any. With
    `threshold`, in (0, 1], pairs below it count 0. `angles` is the unit of all angles.

    Source: the volume IoU of Objectron (arXiv:2012.09988, 4), which clips one oriented box by the other; the reward of
    3D-R1 (arXiv:2507.23478), whose code compares boxes along the axes.
    Departures: the volume is summed over the clipped faces of both boxes by the divergence theorem, without a convex
    hull. More than ten boxes for each of the target's earn 0.
    Unscorable: the target is not such a box or list, or a side is not above 0.
    """
    try:
        targets = parse_boxes(target_value(sample, AnswerType.JSON), angles, up)
    except ValueError as error:
        raise Unscorable(f"the target {error}") from error
    try:
        answers = parse_boxes(answer_value(response), angles, up)
    except ValueError as error:
        raise BadAnswer(f"the answer {error}") from error
    if len(answers) > _MAX_SURPLUS * max(1, len(targets)):
        raise BadAnswer(f"{len(answers)} boxes, expected {len(targets)}")
    fits = matching.match_labels([box.label for box in answers], [box.label for box in targets])
    overlaps = np.zeros(fits.shape)
    for row, column in np.argwhere(fits):
        overlap = volume_iou(answers[row], targets[column])
        overlaps[row, column] = overlap if overlap >= (threshold or 0.0) else 0.0
    matched = matching.match_one_to_one(overlaps)
    return RewardValue(min(1.0, matched.mean_gain), f"mean 3D IoU {matched.mean_gain:.2f}: {matched.summary}")


def parse_boxes(value: object, angles: AngleUnit, up: Axis) -> list[OrientedBox]:
    """Return the boxes in parsed JSON: one box or a list of them.

    Raises:
        ValueError: the value is neither, or a box has the wrong count of numbers or a side that is not above 0.
    """
    is_one = isinstance(value, Mapping) or (isinstance(value, list | tuple) and any(map(is_number, value)))
    entries = [value] if is_one else value
    if not isinstance(entries, list | tuple):
        raise ValueError(f"{value!r:.80} is neither a box nor a list of boxes")
    return [_parse_box(entry, angles, up) for entry in entries]


def volume_iou(a: OrientedBox, b: OrientedBox) -> float:
    """Return |A & B| / |A | B| of two boxes, in [0, 1]."""
    scale = max(*a.sizes, *b.sizes)
    if dist(a.centre, b.centre) >= (hypot(*a.sizes) + hypot(*b.sizes)) / 2:
        return 0.0
    volumes = [prod(side / scale for side in box.sizes) for box in (a, b)]
    shared = _shared_upright(a, b, scale) if a.is_upright and b.is_upright else _shared_volume(a, b, scale)
    # Rounding may leave the shared volume a little beyond its limits.
    shared = min(max(0.0, shared), *volumes)
    return shared / (sum(volumes) - shared)


def _parse_box(entry: object, angles: AngleUnit, up: Axis) -> OrientedBox:
    """Return the box that one entry of a list describes."""
    numbers, label = entry, ""
    if isinstance(entry, Mapping):
        numbers, label = entry.get("bbox_3d"), entry.get("label") or ""
    if not isinstance(numbers, list | tuple) or len(numbers) not in (6, 7, 9) or not all(map(is_number, numbers)):
        raise ValueError(f"{entry!r:.80} is not six, seven or nine numbers of a bbox_3d")
    values = [float(number) for number in numbers]
    if not isinstance(label, str):
        raise ValueError(f"{entry!r:.80} has a label that is not text")
    if min(values[3:6]) <= 0.0 or max(map(abs, values)) > _MAX_LENGTH:
        raise ValueError(f"{entry!r:.80} has a side that is not above 0, or a length above 1e9")
    turns = values[6:]
    if len(turns) == 1:
        turns = [turns[0] if axis == up else 0.0 for axis in ("x", "y", "z")]
    x, y, z, x_size, y_size, z_size = values[:6]
    radians_by_axis = [turn * _RADIANS[angles] for turn in turns or (0.0, 0.0, 0.0)]
    return OrientedBox((x, y, z), (x_size, y_size, z_size), _rotated_axes(*radians_by_axis), label)


def _rotated_axes(a: float, b: float, c: float) -> tuple[Vector, Vector, Vector]:
    """Return the columns of Rz(c) Ry(b) Rx(a), the axes of a box turned by a about x, b about y and c about z."""
    (sa, ca), (sb, cb), (sc, cc) = ((sin(angle), cos(angle)) for angle in (a, b, c))
    return (
        (cc * cb, sc * cb, -sb),
        (cc * sb * sa - sc * ca, sc * sb * sa + cc * ca, cb * sa),
        (cc * sb * ca + sc * sa, sc * sb * ca - cc * sa, cb * ca),
    )


def _shared_upright(a: OrientedBox, b: OrientedBox, scale: float) -> float:
    """Return the volume that two boxes along the axes share, in units of `scale` cubed."""
    volume = 1.0
    for centre_a, size_a, centre_b, size_b in zip(a.centre, a.sizes, b.centre, b.sizes, strict=True):
        reach = (size_a + size_b) / 2 - abs(centre_a - centre_b)
        volume *= max(0.0, min(size_a, size_b, reach)) / scale
    return volume


def _shared_volume(a: OrientedBox, b: OrientedBox, scale: float) -> float:
    """Return the volume that two boxes share, in units of `scale` cubed.

    The boundary of what they share is what each face keeps inside the other box. By the divergence theorem, the volume
    is a third of the sum of offset times area over these polygons.
    """
    faces_a, faces_b = _make_faces(a, a.centre, scale), _make_faces(b, a.centre, scale)
    volume = sum(face.offset * _clipped_area(face, faces_b) for face in faces_a)
    for face in faces_b:
        # Where two faces coincide, what both boxes share has the face once.
        if not any(_coincide(face, other) for other in faces_a):
            volume += face.offset * _clipped_area(face, faces_a)
    return volume / 3.0


def _make_faces(box: OrientedBox, origin: Vector, scale: float) -> list[_Face]:
    """Return the six faces of a box, seen from `origin` and in units of `scale`."""
    centre = [(c - o) / scale for c, o in zip(box.centre, origin, strict=True)]
    halves = [_scaled(axis, size / scale / 2) for axis, size in zip(box.axes, box.sizes, strict=True)]
    faces = []
    for index in range(3):
        u, v = halves[index - 2], halves[index - 1]
        for side in (-1.0, 1.0):
            normal, middle = _scaled(box.axes[index], side), _added(centre, _scaled(halves[index], side))
            corners = [
                _added(middle, _added(_scaled(u, i), _scaled(v, j))) for i, j in ((-1, -1), (1, -1), (1, 1), (-1, 1))
            ]
            faces.append(_Face(normal, _dot(normal, middle), corners))
    return faces


def _clipped_area(face: _Face, others: Sequence[_Face]) -> float:
    """Return the area of the part of a face that lies inside a box, given by its faces (Sutherland and Hodgman)."""
    polygon = face.corners
    for other in others:
        heights = [_dot(other.normal, corner) - other.offset for corner in polygon]
        kept: list[Vector] = []
        for index, (corner, height) in enumerate(zip(polygon, heights, strict=True)):
            before, height_before = polygon[index - 1], heights[index - 1]
            if (height > _TOLERANCE) != (height_before > _TOLERANCE):
                share = height_before / (height_before - height)
                kept.append(_added(before, _scaled(_added(corner, _scaled(before, -1.0)), share)))
            if height <= _TOLERANCE:
                kept.append(corner)
        polygon = kept
    doubled = [0.0, 0.0, 0.0]
    for (x1, y1, z1), (x2, y2, z2) in zip(polygon, polygon[1:] + polygon[:1], strict=True):
        doubled = [doubled[0] + y1 * z2 - z1 * y2, doubled[1] + z1 * x2 - x1 * z2, doubled[2] + x1 * y2 - y1 * x2]
    return hypot(*doubled) / 2


def _coincide(face: _Face, other: _Face) -> bool:
    """Return True if two faces lie in one plane and look to the same side."""
    distances = [abs(_dot(other.normal, corner) - other.offset) for corner in face.corners]
    return _dot(face.normal, other.normal) > 0.0 and max(distances) <= _TOLERANCE


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _added(a: Sequence[float], b: Sequence[float]) -> Vector:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def _scaled(a: Sequence[float], factor: float) -> Vector:
    return a[0] * factor, a[1] * factor, a[2] * factor
