"""Rewards for objects that an answer gives by a box and a point each, such as the prompts of a segmentation model."""

from __future__ import annotations

from collections.abc import Mapping
from math import hypot
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmrl.answer import validate_value
from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import geometry, matching
from mmrl_rewards.contract import answer_value, column_value, parse_part, parse_target, reward, target_value


class _Objects(NamedTuple):
    """Holds N objects, in px_original once they are converted."""

    coordinates: NDArray[np.float64]  # [N, 6], x1, y1, x2, y2 of the box, x, y of the point
    labels: list[str]  # as written; empty for an object without a label


@reward(name="boxes_and_points", answer_types=(AnswerType.JSON,))
def boxes_and_points(
    response: Response,
    sample: Sample,
    *,
    threshold: geometry.Threshold = 0.65,
    corners: geometry.Share = 0.0084,
    radius: geometry.Share = 0.025,
) -> RewardValue:
    """Return sum(s) / max(answers, targets), in [0, 1], over the one-to-one matching with the largest sum.

    s is the share of three tests that a pair passes: IoU >= `threshold`; the mean of |dx1|, |dy1|, |dx2| and |dy2| is
    at most `corners` of the image's diagonal; the answer's point is at most `radius` of the diagonal from the target's,
    and inside the answer's own box.

    Answer and target are JSON, [{"bbox_2d": [x1, y1, x2, y2], "point_2d": [x, y], "label": ".."}, ...]. Objects match
    if their labels do: a target without a label matches any. If the target has no objects, an empty list earns 1.

    Source: the accuracy reward of Affordance-R1 (arXiv:2508.06206; aff_r1.py), which follows VisionReasoner
    (arXiv:2505.12081), with IoU above 0.65, corners below 10 px and points below 30 px on 840 x 840.
    Departures: the value is a third of theirs, and a test is passed at its threshold. Distances are relative to the
    original image's diagonal. Coordinates are continuous, so IoU has no +1. Theirs compares the first 120 objects.
    Unscorable: the target is not such a list, or it has no coordinate system, or its image does not exist.
    """
    targets = parse_target(sample, AnswerType.JSON, _parse_objects)
    target = np.reshape(geometry.target_to_pixels(response, sample, targets.coordinates.ravel().tolist()), (-1, 6))
    answers = parse_part(response, AnswerType.JSON, _parse_objects)
    answer = np.reshape(geometry.answer_to_pixels(response, sample, answers.coordinates.ravel().tolist()), (-1, 6))
    diagonal = hypot(*geometry.resize_map(response, sample).original)
    boxes, points = answer[:, :4], answer[:, 4:]
    inside = np.all((boxes[:, :2] <= points) & (points <= boxes[:, 2:]), axis=1, keepdims=True)
    # [answers, targets, 6]
    offsets = np.abs(answer[:, None] - target[None])
    passed = [
        matching.pairwise_box_iou(boxes, target[:, :4]) >= threshold,
        offsets[..., :4].mean(axis=-1) <= corners * diagonal,
        (np.hypot(offsets[..., 4], offsets[..., 5]) <= radius * diagonal) & inside,
    ]
    gains = np.mean(passed, axis=0) * matching.match_labels(answers.labels, targets.labels)
    matched = matching.match_one_to_one(gains)
    return RewardValue(matched.mean_gain, f"mean {matched.mean_gain:.2f} of three tests: {matched.summary}")


@reward(name="object_count", answer_types=(AnswerType.JSON,))
def count(response: Response, sample: Sample) -> RewardValue:
    """Return 1 if the answer has as many objects as the target, else 0. Both are JSON as in `boxes_and_points`.

    Source: the count term of Affordance-R1 (arXiv:2508.06206; aff_r1.py).
    Departures: the objects must be complete. Theirs counts the entries of any list, or the keys of an object.
    Unscorable: the target is not a list of such objects.
    """
    expected = len(parse_target(sample, AnswerType.JSON, _parse_objects).labels)
    given = len(parse_part(response, AnswerType.JSON, _parse_objects).labels)
    return RewardValue(float(given == expected), f"{given} objects, expected {expected}")


@reward(name="object_names", answer_types=(AnswerType.JSON,))
def names(response: Response, sample: Sample, *, key: str = "label", column: str = "label") -> RewardValue:
    """Return the share of the answer's objects whose `key` is the text in `sample.meta[column]`.

    Texts are compared apart from case and outer white space. An answer without objects gets 0.

    Source: the recognition term of Affordance-R1 (arXiv:2508.06206; aff_r1.py).
    Departures: names must be equal. Theirs compares word2vec embeddings above 0.8, and gives 0 to several objects.
    Unscorable: the target is not JSON, or the column holds no text.
    """
    target_value(sample, AnswerType.JSON)  # only its type counts
    expected = column_value(sample, column)
    if not isinstance(expected, str) or not expected.strip():
        raise Unscorable(f"the column {column!r} holds {expected!r:.80}, not a text")
    value = answer_value(response)
    entries = value if isinstance(value, list) else [value]
    given = [str(entry.get(key, "")) if isinstance(entry, Mapping) else "" for entry in entries]
    right = int(matching.match_labels(given, [expected]).sum())
    return RewardValue(right / max(len(given), 1), f"{right} of {len(given)} objects have {key} {expected!r:.40}")


def _parse_objects(value: object) -> _Objects:
    """Return the objects in parsed JSON, a list of them or a single one.

    Raises:
        ValueError: the value is neither, or an object lacks a valid box or point.
    """
    entries = [value] if isinstance(value, Mapping) else value
    if not isinstance(entries, list | tuple):
        raise ValueError(f"{value!r:.80} is not a list of objects with bbox_2d and point_2d")
    rows, labels = [], []
    for entry in entries:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("label", ""), str):
            raise ValueError(f"{entry!r:.80} is not an object with bbox_2d, point_2d and a label of text")
        try:
            box = validate_value(AnswerType.BOX, entry.get("bbox_2d"))
            point = validate_value(AnswerType.POINT, entry.get("point_2d"))
        except ValueError as error:
            raise ValueError(f"{entry!r:.80} has a bbox_2d or point_2d that is {error}") from error
        rows.append([*box, *point])
        labels.append(entry.get("label", ""))
    return _Objects(np.array(rows, dtype=np.float64).reshape(-1, 6), labels)
