"""Rewards for a list of boxes. Boxes are compared in px_original, and only with targets of the same label.

Every one of them pays less for every box too many, so that listing all that might be there does not pay; none looks at
the order of the list. A target without boxes is right answered by an empty list.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmrl.types import AnswerType, CoordinateSystem, Region, ResizeMap, Response, RewardValue, Sample
from mmrl_rewards import geometry, matching
from mmrl_rewards.contract import reward, target_value

_RECALL_LEVELS = np.linspace(0.0, 1.0, 101).tolist()
_MAX_RANKED = 100


@reward(name="boxes_iou", answer_types=(AnswerType.BOXES,))
def iou(
    response: Response,
    sample: Sample,
    *,
    threshold: geometry.Threshold | None = None,
    count: Literal["any", "exact"] = "any",
) -> RewardValue:
    """Mean IoU of the best one-to-one matching, sum(IoU) / max(answers, targets).

    With `threshold`, pairs below it count nothing; with `count` exact, a list of another length earns 0. Source: the
    IoU reward of Visual-RFT (arXiv:2503.01785, 3.2), whose code divides by the larger count and matches above 0.5;
    optimal matching as in DETR (arXiv:2005.12872, 3.1). Departures: matched by overlap, not greedily by confidence;
    repeated boxes are boxes too many; the text of the answer is never compared, only its boxes.

    Raises:
        Unscorable: the target is not a list of boxes with x1 < x2, y1 < y2, or has no frame or no medium.
    """
    target, answer = _target_boxes(response, sample), _answer_boxes(response, sample)
    if answer is None:
        return RewardValue(0.0, response.answer.problems[0])
    if count == "exact" and len(answer.boxes) != len(target.boxes):
        return RewardValue(0.0, f"{len(answer.boxes)} boxes, expected {len(target.boxes)}")
    found = matching.match_one_to_one(_matching_gains(answer, target, threshold))
    return RewardValue(found.mean_gain, f"mean IoU {found.mean_gain:.2f}: {found.summary}")


@reward(name="boxes_f1", answer_types=(AnswerType.BOXES,))
def f1(response: Response, sample: Sample, *, threshold: geometry.Threshold | None = None) -> RewardValue:
    """2 sum(IoU of matched boxes) / (answers + targets), over the best one-to-one matching.

    With `threshold`, the usual F1: a pair counts 1 if IoU >= threshold and else 0. Source: F1 is 2 P R / (P + R) with
    precision and recall summed over soft matches; assignment by scipy. Departures: none.

    Raises:
        Unscorable: as `iou`.
    """
    target, answer = _target_boxes(response, sample), _answer_boxes(response, sample)
    if answer is None:
        return RewardValue(0.0, response.answer.problems[0])
    gains = _matching_gains(answer, target, threshold)
    found = matching.match_one_to_one(gains if threshold is None else np.sign(gains))
    return RewardValue(found.f1, f"F1 {found.f1:.2f}: {found.summary}")


@reward(name="boxes_ap", answer_types=(AnswerType.BOXES,))
def average_precision(
    response: Response, sample: Sample, *, thresholds: geometry.Thresholds = geometry.COCO_THRESHOLDS
) -> RewardValue:
    """AP x min(1, targets / answers), AP averaged over `thresholds` and the target's labels.

    Source: odLength of VLM-R1 (arXiv:2504.07615), AP as pycocotools computes it: greedy matching by confidence,
    the best 100 boxes per label, precision interpolated at 101 recalls. AP alone does not see boxes after the last hit,
    nor labels the target lacks; the factor counts them all. Departures: a box without confidence has confidence 1, and
    equally confident boxes rank by overlap, not by their order in the list.

    Raises:
        Unscorable: as `iou`.
    """
    target, answer = _target_boxes(response, sample), _answer_boxes(response, sample)
    if answer is None:
        return RewardValue(0.0, response.answer.problems[0])
    answers, targets = len(answer.boxes), len(target.boxes)
    if not (answers and targets):
        return RewardValue(float(answers == targets), f"{answers} boxes, expected {targets}")
    overlaps, fits = (
        matching.pairwise_box_iou(answer.boxes, target.boxes),
        matching.match_labels(answer.labels, target.labels),
    )
    labels = np.array([label.strip().casefold() for label in target.labels])
    of_label = [(labels == label, fits[:, labels == label].any(axis=1)) for label in np.unique(labels)]
    precisions = [
        _label_precision(overlaps[named][:, wanted], answer.boxes[named], answer.confidences[named], thresholds)
        for wanted, named in of_label
    ]
    value, control = fmean(precisions), min(1.0, targets / answers)
    return RewardValue(value * control, f"AP {value:.2f} x {control:.2f}: {answers} boxes, expected {targets}")


@reward(name="boxes_confidence", answer_types=(AnswerType.BOXES,))
def confidence(response: Response, sample: Sample, *, threshold: geometry.Threshold = 0.5) -> RewardValue:
    """R_IoU (1 + R_conf) / 2: R_IoU as `iou` with this threshold, R_conf the mean of c if matched and else 1 - c.

    c is a box's stated confidence in [0, 1]; 1 when it states none. Source: the detection reward of Visual-RFT
    (arXiv:2503.01785, 3.2, R_IoU + R_conf). Departures: confidence multiplies what the boxes earn instead of being
    added, so a wrong box disowned with confidence 0 earns nothing; labels must agree; otherwise as `iou`.

    Raises:
        Unscorable: as `iou`.
    """
    target, answer = _target_boxes(response, sample), _answer_boxes(response, sample)
    if answer is None:
        return RewardValue(0.0, response.answer.problems[0])
    found = matching.match_one_to_one(_matching_gains(answer, target, threshold))
    honesty = 1.0 - answer.confidences
    honesty[found.rows] = answer.confidences[found.rows]
    honest = float(honesty.mean()) if found.num_answers else 1.0
    reason = f"mean IoU {found.mean_gain:.2f}, confidence {honest:.2f}: {found.summary}"
    return RewardValue(found.mean_gain * (1.0 + honest) / 2.0, reason)


class _LabeledBoxes(NamedTuple):
    """Boxes in px_original, each with what it is called and how sure it is."""

    boxes: NDArray[np.float64]
    labels: tuple[str, ...]
    confidences: NDArray[np.float64]


def _target_boxes(response: Response, sample: Sample) -> _LabeledBoxes:
    regions = target_value(sample, AnswerType.BOXES)
    return _boxes_in_pixels(regions, geometry.resize_map(response, sample), geometry.target_coordinate_system(sample))


def _answer_boxes(response: Response, sample: Sample) -> _LabeledBoxes | None:
    if response.answer.value is None:
        return None
    return _boxes_in_pixels(response.answer.value, geometry.resize_map(response, sample), response.coordinate_system)


def _boxes_in_pixels(regions: Sequence[Region], resize: ResizeMap, source: CoordinateSystem) -> _LabeledBoxes:
    sure = [1.0 if region.confidence is None else region.confidence for region in regions]
    return _LabeledBoxes(
        boxes=np.array(geometry.regions_to_pixels(resize, regions, source), dtype=np.float64).reshape(-1, 4),
        labels=tuple(region.label for region in regions),
        confidences=np.array(sure, dtype=np.float64),
    )


def _matching_gains(answer: _LabeledBoxes, target: _LabeledBoxes, threshold: float | None) -> matching.Matrix:
    """IoU where the labels agree and `threshold` is reached, else 0."""
    overlaps = matching.pairwise_box_iou(answer.boxes, target.boxes)
    counts = matching.match_labels(answer.labels, target.labels) & (overlaps >= (threshold or 0.0))
    return np.where(counts, overlaps, 0.0)


def _label_precision(
    overlaps: matching.Matrix,
    boxes: NDArray[np.float64],
    confidences: NDArray[np.float64],
    thresholds: Sequence[float],
) -> float:
    """AP of one label, averaged over thresholds; the coordinates settle what confidence and overlap leave tied."""
    ranking = np.lexsort((*boxes.T, -overlaps.max(axis=1), -confidences))[:_MAX_RANKED]
    ranked, targets = overlaps[ranking].tolist(), overlaps.shape[1]
    return fmean(_interpolated_precision(_hit_ranks(ranked, targets, threshold), targets) for threshold in thresholds)


def _hit_ranks(overlaps: Sequence[Sequence[float]], num_targets: int, threshold: float) -> list[int]:
    """Ranks, from 1, of the answers that find a target: the best one still free, if it reaches the threshold."""
    free, hits = list(range(num_targets)), []
    for rank, row in enumerate(overlaps, 1):
        best = max(free, key=row.__getitem__, default=None)
        if best is not None and row[best] >= threshold:
            free.remove(best)
            hits.append(rank)
    return hits


def _interpolated_precision(hits: Sequence[int], num_targets: int) -> float:
    """Area under precision over recall: precision made to fall monotonically, and read at 101 levels of recall."""
    precisions = [found / rank for found, rank in enumerate(hits, 1)]
    falling = list(accumulate(reversed(precisions), max))[::-1]
    levels = [0, *(bisect_right(_RECALL_LEVELS, found / num_targets) for found in range(1, len(hits) + 1))]
    return sum(p * (level - before) for p, before, level in zip(falling, levels, levels[1:], strict=False)) / 101
