"""Rewards for a list of boxes. Boxes are compared in px_original, and only with targets of the same label.

Every superfluous box lowers the value, so listing all plausible boxes does not pay. The order of the list has no
effect. If the target has no boxes, an empty list earns 1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmrl.types import AnswerType, Region, Response, RewardValue, Sample
from mmrl_rewards import geometry, matching
from mmrl_rewards.contract import answer_value, reward, target_value

_RECALL_LEVELS = np.linspace(0.0, 1.0, 101).tolist()
_MAX_RANKED = 100  # boxes per label, COCO's largest maxDets


@reward(name="boxes_iou", answer_types=(AnswerType.BOXES,))
def iou(
    response: Response,
    sample: Sample,
    *,
    threshold: geometry.Threshold | None = None,
    count: Literal["any", "exact"] = "any",
) -> RewardValue:
    """Return the mean IoU of the best one-to-one matching, sum(IoU) / max(answers, targets), in [0, 1].

    With `threshold`, in (0, 1], pairs below it count 0. With `count` exact, a list of another length than the target's
    earns 0.

    Source: the IoU reward of Visual-RFT (arXiv:2503.01785, 3.2), whose code divides by the larger count and matches
    above 0.5; optimal matching as in DETR (arXiv:2005.12872, 3.1).
    Departures: boxes are matched by overlap instead of greedily by confidence, and repeated boxes are superfluous
    boxes. The text of the answer is never compared, only its boxes.
    Unscorable: the target is not a list of boxes with x1 < x2 and y1 < y2, or it has no coordinate system, or its image
    or video does not exist.
    """
    answer, target = _read_boxes(response, sample)
    if count == "exact" and len(answer.boxes) != len(target.boxes):
        return RewardValue(0.0, f"{len(answer.boxes)} boxes, expected {len(target.boxes)}")
    matched = matching.match_one_to_one(_matching_gains(answer, target, threshold))
    return RewardValue(matched.mean_gain, f"mean IoU {matched.mean_gain:.2f}: {matched.summary}")


@reward(name="boxes_f1", answer_types=(AnswerType.BOXES,))
def f1(response: Response, sample: Sample, *, threshold: geometry.Threshold | None = None) -> RewardValue:
    """Return 2 sum(IoU of matched boxes) / (answers + targets), in [0, 1], over the best one-to-one matching.

    With `threshold`, in (0, 1], it is the usual F1: a pair counts 1 if IoU >= threshold and else 0.

    Source: F1 is 2 P R / (P + R) with precision and recall summed over soft matches; assignment by scipy.
    Departures: none.
    Unscorable: the target is invalid, see `iou`.
    """
    answer, target = _read_boxes(response, sample)
    gains = _matching_gains(answer, target, threshold)
    matched = matching.match_one_to_one(gains if threshold is None else np.sign(gains))
    return RewardValue(matched.f1, f"F1 {matched.f1:.2f}: {matched.summary}")


@reward(name="boxes_ap", answer_types=(AnswerType.BOXES,))
def average_precision(
    response: Response, sample: Sample, *, thresholds: geometry.Thresholds = geometry.COCO_THRESHOLDS
) -> RewardValue:
    """Return AP x min(1, targets / answers), in [0, 1], with AP averaged over `thresholds` and the target's labels.

    AP alone ignores boxes after the last hit and boxes with labels that the target lacks. The factor counts both.

    Source: odLength of VLM-R1 (arXiv:2504.07615), with AP as pycocotools computes it: greedy matching by confidence,
    the best 100 boxes per label, precision interpolated at 101 recall levels.
    Departures: a box without a confidence has confidence 1. Boxes of equal confidence are ranked by overlap instead of
    their order in the list.
    Unscorable: the target is invalid, see `iou`.
    """
    answer, target = _read_boxes(response, sample)
    num_answers, num_targets = len(answer.boxes), len(target.boxes)
    if not (num_answers and num_targets):
        return RewardValue(float(num_answers == num_targets), f"{num_answers} boxes, expected {num_targets}")
    overlaps = matching.pairwise_box_iou(answer.boxes, target.boxes)
    fits = matching.match_labels(answer.labels, target.labels)
    target_labels = np.array([label.strip().casefold() for label in target.labels])
    precisions = []
    for label in np.unique(target_labels):
        targets_of_label = target_labels == label
        answers_of_label = fits[:, targets_of_label].any(axis=1)
        label_overlaps = overlaps[answers_of_label][:, targets_of_label]
        boxes, confidences = answer.boxes[answers_of_label], answer.confidences[answers_of_label]
        precisions.append(_label_precision(label_overlaps, boxes, confidences, thresholds))
    # AP does not count superfluous boxes that rank after the last hit; the factor does.
    precision, factor = fmean(precisions), min(1.0, num_targets / num_answers)
    reason = f"AP {precision:.2f} x {factor:.2f}: {num_answers} boxes, expected {num_targets}"
    return RewardValue(precision * factor, reason)


@reward(name="boxes_confidence", answer_types=(AnswerType.BOXES,))
def confidence(response: Response, sample: Sample, *, threshold: geometry.Threshold = 0.5) -> RewardValue:
    """Return R_IoU (1 + R_conf) / 2, in [0, 1]. R_IoU is `iou` with this threshold.

    R_conf is the mean of c over matched boxes and of 1 - c over the others, where c is a box's confidence in [0, 1], or
    1 when it states none.

    Source: the detection reward of Visual-RFT (arXiv:2503.01785, 3.2, R_IoU + R_conf).
    Departures: confidence multiplies R_IoU instead of being added, so a wrong box with confidence 0 earns nothing.
    Labels must agree. The departures of `iou` apply.
    Unscorable: the target is invalid, see `iou`.
    """
    answer, target = _read_boxes(response, sample)
    matched = matching.match_one_to_one(_matching_gains(answer, target, threshold))
    # Matched boxes are overwritten below.
    box_scores = 1.0 - answer.confidences
    box_scores[matched.rows] = answer.confidences[matched.rows]
    confidence_score = float(box_scores.mean()) if matched.num_answers else 1.0
    reason = f"mean IoU {matched.mean_gain:.2f}, confidence {confidence_score:.2f}: {matched.summary}"
    return RewardValue(matched.mean_gain * (1.0 + confidence_score) / 2.0, reason)


class _LabeledBoxes(NamedTuple):
    """Holds N boxes in px_original with their labels and confidences."""

    boxes: NDArray[np.float64]  # [N, 4], x1, y1, x2, y2
    labels: tuple[str, ...]  # as written; empty for a box without a label
    confidences: NDArray[np.float64]  # [N]; 1 for a box without a confidence

    @classmethod
    def from_regions(cls, regions: Sequence[Region], coordinates: Sequence[float]) -> _LabeledBoxes:
        """Return the boxes of `regions`, whose coordinates in px_original are x1, y1, x2, y2, x1, ..."""
        confidences = [1.0 if region.confidence is None else region.confidence for region in regions]
        boxes = np.array(coordinates, dtype=np.float64).reshape(-1, 4)
        return cls(boxes, tuple(region.label for region in regions), np.array(confidences, dtype=np.float64))


def _read_boxes(response: Response, sample: Sample) -> tuple[_LabeledBoxes, _LabeledBoxes]:
    """Return the answer's boxes and the target's."""
    regions = target_value(sample, AnswerType.BOXES)
    # One conversion for all boxes: an answer may list thousands.
    coordinates = geometry.target_to_pixels(response, sample, geometry.region_coordinates(regions))
    target = _LabeledBoxes.from_regions(regions, coordinates)
    answer = answer_value(response)
    coordinates = geometry.answer_to_pixels(response, sample, geometry.region_coordinates(answer))
    return _LabeledBoxes.from_regions(answer, coordinates), target


def _matching_gains(answer: _LabeledBoxes, target: _LabeledBoxes, threshold: float | None) -> matching.Matrix:
    """Return IoU where the labels agree and `threshold` is reached, else 0, [answers, targets]."""
    overlaps = matching.pairwise_box_iou(answer.boxes, target.boxes)
    counts = matching.match_labels(answer.labels, target.labels) & (overlaps >= (threshold or 0.0))
    return np.where(counts, overlaps, 0.0)


def _label_precision(
    overlaps: matching.Matrix, boxes: NDArray[np.float64], confidences: NDArray[np.float64], thresholds: Sequence[float]
) -> float:
    """Return the AP of one label, averaged over `thresholds`, in [0, 1].

    `overlaps` [answers, targets] are the IoUs of its answers `boxes` [answers, 4], with `confidences` [answers].
    """
    # Ties in confidence and overlap are broken by the coordinates, so that the order of the list has no effect.
    ranking = np.lexsort((*boxes.T, -overlaps.max(axis=1), -confidences))[:_MAX_RANKED]
    ranked, num_targets = overlaps[ranking].tolist(), overlaps.shape[1]
    precisions = []
    for threshold in thresholds:
        free, hits = list(range(num_targets)), []
        for rank, row in enumerate(ranked, 1):
            # As pycocotools: each answer takes the free target that overlaps it most, if the overlap suffices.
            best = max(free, key=row.__getitem__, default=None)
            if best is not None and row[best] >= threshold:
                free.remove(best)
                hits.append(rank)
        precisions.append(interpolated_precision(hits, num_targets))
    return fmean(precisions)


def interpolated_precision(hits: Sequence[int], num_targets: int) -> float:
    """Return the mean precision at 101 levels of recall, given the ranks of the answers that find a target.

    The precision at a recall level is the largest at that recall or above.
    """
    precisions = [num_found / rank for num_found, rank in enumerate(hits, 1)]
    falling = list(accumulate(reversed(precisions), max))[::-1]
    weighted = []
    levels_before = 0
    # Every recall level beyond the last hit has the precision 0, and adds nothing.
    for num_found, precision in enumerate(falling, 1):
        levels_reached = bisect_right(_RECALL_LEVELS, num_found / num_targets)
        weighted.append(precision * (levels_reached - levels_before))
        levels_before = levels_reached
    return sum(weighted) / 101
