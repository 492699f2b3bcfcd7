"""A reward for oriented boxes in space, six, seven or nine numbers each, in one frame that answer and target share.

    [x, y, z, x_size, y_size, z_size]              sides along the axes
    [x, y, z, x_size, y_size, z_size, heading]     turned about the axis `up`
    [x, y, z, x_size, y_size, z_size, a, b, c]     turned by a about x, then by b about y, then by c about z

(x, y, z) is the centre. The last form is what Qwen3-VL writes as `bbox_3d`: metres in the frame of the camera, angles
in half turns, so 0.5 is 90 degrees. Its cookbook on 3D grounding calls the angles roll, pitch and yaw where it asks
for them, and applies them about x, y and z, in this order, where it draws the box.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import hypot
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from mmrl.answer import is_number
from mmrl.types import AnswerType, Response, RewardValue, Sample
from mmrl_rewards import geometry, matching
from mmrl_rewards.contract import BadAnswer, parse_part, parse_target, reward

AngleUnit = Literal["half_turns", "radians", "degrees"]
Axis = Literal["x", "y", "z"]
Array = np.ndarray[Any, np.dtype[np.float64]]

_RADIANS: Final = {"half_turns": np.pi, "radians": 1.0, "degrees": np.pi / 180.0}
_TOLERANCE = 1e-10  # in units of the longest side of both boxes
_MAX_LENGTH = 1e9  # beyond it, the difference of two coordinates has too few digits
_MAX_SURPLUS = 10  # boxes of an answer for each of the target's
_CORNERS: Final = np.array([[x, y, z] for x in (-1.0, 1.0) for y in (-1.0, 1.0) for z in (-1.0, 1.0)])
# The pairs of corners that differ in one coordinate.
_EDGES: Final = np.argwhere(np.triu(np.abs(_CORNERS[:, None] - _CORNERS).sum(axis=-1) == 2.0))


class OrientedBox(NamedTuple):
    """Holds a box in space."""

    centre: Array  # [3]
    sizes: Array  # [3], lengths of the sides, above 0
    axes: Array  # [3, 3], columns are unit vectors along the sides
    label: str  # as written; empty for a box without a label


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

    Source: the exact volume IoU of Objectron (arXiv:2012.09988, 4), the convex hull of clipped edges; the reward of
    3D-R1 (arXiv:2507.23478), whose code compares boxes along the axes.
    Departures: boxes are matched one to one, and more than ten for each of the target's earn 0.
    Unscorable: the target is not such a box or list, or a side is not above 0.
    """
    parse = partial(parse_boxes, angles=angles, up=up)
    targets = parse_target(sample, AnswerType.JSON, parse)
    answers = parse_part(response, AnswerType.JSON, parse)
    if len(answers) > _MAX_SURPLUS * max(1, len(targets)):
        raise BadAnswer(f"{len(answers)} boxes, expected {len(targets)}")
    fits = matching.match_labels([box.label for box in answers], [box.label for box in targets])
    overlaps = np.zeros(fits.shape)
    for row, column in np.argwhere(fits):
        overlap = volume_iou(answers[row], targets[column])
        overlaps[row, column] = overlap if overlap >= (threshold or 0.0) else 0.0
    matched = matching.match_one_to_one(overlaps)
    return RewardValue(matched.mean_gain, f"mean 3D IoU {matched.mean_gain:.2f}: {matched.summary}")


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
    if hypot(*(a.centre - b.centre)) >= (hypot(*a.sizes) + hypot(*b.sizes)) / 2:
        return 0.0
    # Many modules import this one, and few runs have boxes in space.
    from scipy.spatial import ConvexHull, QhullError

    # Lengths in units of the longest side, so that volumes neither overflow nor vanish.
    scale = float(max(*a.sizes, *b.sizes))
    volumes = [float((box.sizes / scale).prod()) for box in (a, b)]
    # Each corner of what two boxes share is the end of an edge of one, clipped by the other.
    corners = np.concatenate([_clip_edges(a, b), _clip_edges(b, a)]) / scale
    try:
        shared = min(float(ConvexHull(corners).volume), *volumes)
    except (QhullError, ValueError):
        # No corners, or all in one plane: the boxes are apart, or touch.
        return 0.0
    return shared / (sum(volumes) - shared)


def _clip_edges(box: OrientedBox, other: OrientedBox) -> Array:
    """Return both ends of every edge of a box that reaches into the other one, [points, 3]."""
    corners = (_CORNERS * box.sizes / 2) @ box.axes.T + box.centre - other.centre
    # In the frame of the other box, whose faces are at plus and minus half its sizes.
    starts, ends = (corners @ other.axes)[_EDGES].swapaxes(0, 1)
    # The tolerance keeps an edge that lies in a face from being rounded to the outside.
    steps, half = ends - starts, other.sizes / 2 + _TOLERANCE * max(*box.sizes, *other.sizes)
    # An edge parallel to a face never crosses it: both crossings become huge, of one sign if it lies outside.
    steps[steps == 0.0] = 1e-300
    with np.errstate(over="ignore"):
        crossings = np.sort([(-half - starts) / steps, (half - starts) / steps], axis=0)
    first, last = np.maximum(crossings[0].max(axis=1), 0.0), np.minimum(crossings[1].min(axis=1), 1.0)
    kept = first <= last
    shares = np.stack([first[kept], last[kept]])[..., None]
    inside = (starts[kept] + shares * (ends - starts)[kept]).reshape(-1, 3)
    return np.asarray(inside @ other.axes.T + other.centre)


def _parse_box(entry: object, angles: AngleUnit, up: Axis) -> OrientedBox:
    """Return the box that one entry of a list describes."""
    numbers, label = entry, ""
    if isinstance(entry, Mapping):
        numbers, label = entry.get("bbox_3d"), entry.get("label") or ""
    if not isinstance(label, str):
        raise ValueError(f"{entry!r:.80} has a label that is not text")
    if not isinstance(numbers, list | tuple) or len(numbers) not in (6, 7, 9) or not all(map(is_number, numbers)):
        raise ValueError(f"{entry!r:.80} is not six, seven or nine numbers of a bbox_3d")
    values = np.array(numbers, dtype=np.float64)
    if values[3:6].min() <= 0.0 or np.abs(values).max() > _MAX_LENGTH:
        raise ValueError(f"{entry!r:.80} has a side that is not above 0, or a number beyond 1e9")
    turns = values[6:] if len(values) == 9 else np.zeros(3)
    if len(values) == 7:
        turns["xyz".index(up)] = values[6]
    from scipy.spatial.transform import Rotation  # as in `volume_iou`

    # Small letters: about the axes of the frame, first x, then y, then z.
    axes = Rotation.from_euler("xyz", turns * _RADIANS[angles]).as_matrix()
    return OrientedBox(values[:3], values[3:6], axes, label)
