"""Official rules of grounding benchmarks: RefCOCO as VLM-R1 scores it, ScreenSpot, and COCO's average precision.

Sources: src/eval/test_rec_r1.py of github.com/om-ai-lab/VLM-R1 (arXiv:2504.07615); ScreenSpot (arXiv:2401.10935) and
ScreenSpot-Pro (arXiv:2504.07981); COCO's average precision (cocodataset.org, as pycocotools computes it). Departures:
coordinates are converted by the resize map of the image, never by a guess from their size; COCO's crowd regions are
not among the targets, and all areas count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmrl.benchmarks.extraction.extract import Extraction
from mmrl.benchmarks.extraction.match import image_resize_map, is_point_in_box
from mmrl.benchmarks.extraction.text import first_answer_tag
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.types import CoordinateSystem
from mmrl_rewards import matching
from mmrl_rewards.geometry import COCO_THRESHOLDS

_INTEGER_BOX: Final = re.compile(r"\[(\d{1,9}),\s{0,9}(\d{1,9}),\s{0,9}(\d{1,9}),\s{0,9}(\d{1,9})\]")
_IOU_THRESHOLD: Final = 0.5
_RECALL_POINTS: Final = np.linspace(0.0, 1.0, 101)
_MAX_BOXES: Final = 100  # boxes of one label in one image that count, the most confident first; COCO's maxDets


class RankedBoxes(NamedTuple):
    """Predicted boxes of one label over all images. N boxes, T IoU thresholds."""

    confidences: NDArray[np.float64]  # [N], as the model states them; 1 where it states none
    is_match: NDArray[np.bool_]  # [N, T], True where the box found a target at the threshold
    num_targets: int  # boxes to find


def score_refcoco(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Score as VLM-R1: IoU above 0.5 of the last box of whole numbers between braces in the answer tags."""
    answer = first_answer_tag(response.text) or ""
    inner = answer[answer.find("{") : answer.rfind("}")] if "{" in answer and "}" in answer else ""
    boxes = _INTEGER_BOX.findall(inner)
    if not boxes:
        return 0.0
    corners = list(map(float, boxes[-1]))
    resize = image_resize_map(item, response)
    predicted = resize.convert(corners, response.coordinate_system, CoordinateSystem.PX_ORIGINAL)
    target = resize.convert(item.answer, item.coordinate_system, CoordinateSystem.PX_ORIGINAL)
    return float(pixel_iou(predicted, target) > _IOU_THRESHOLD)


def pixel_iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the IoU of two boxes (x1, y1, x2, y2 in pixels) as VLM-R1 computes it."""
    # As published, the intersection counts its last pixel and the areas do not.
    width = min(a[2] - 1, b[2] - 1) - max(a[0], b[0])
    height = min(a[3] - 1, b[3] - 1) - max(a[1], b[1])
    intersection = (width + 1) * (height + 1) if width > 0 and height > 0 else 0.0
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - intersection
    return intersection / union if union > 0 else 0.0


def score_screenspot(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Score as ScreenSpot: the point is in the box."""
    if extraction.regions:
        return float(is_point_in_box(item, response, extraction))
    # In the published code an unreadable answer is the point (0, 0), the top left corner.
    x1, y1, _, _ = item.answer
    return float(x1 <= 0 and y1 <= 0)


def average_precision(results: Sequence[tuple[Item, ItemResponse, Extraction]]) -> float:
    """Return COCO's AP: the mean over labels and ten IoU thresholds of precision interpolated at 101 recalls."""
    labels = sorted({region.label for item, _, _ in results for region in item.answer})
    values = [_label_average_precision(_rank_boxes(results, label)) for label in labels]
    return float(np.mean(values)) if values else 0.0


def _rank_boxes(results: Sequence[tuple[Item, ItemResponse, Extraction]], label: str) -> RankedBoxes:
    confidences: list[float] = []
    matches: list[NDArray[np.bool_]] = []
    num_targets = 0
    for item, response, extraction in results:
        resize = image_resize_map(item, response)
        targets = []
        for region in item.answer:
            if region.label == label:
                targets.append(resize.convert(region.coordinates, item.coordinate_system, CoordinateSystem.PX_ORIGINAL))
        predicted = [region for region in extraction.regions if region.label == label]
        image_confidences = np.array([1.0 if region.confidence is None else region.confidence for region in predicted])
        # A stable sort, as pycocotools uses: equal confidences keep the order of the response.
        order = np.argsort(-image_confidences, kind="mergesort")[:_MAX_BOXES]
        boxes = []
        for index in order:
            corners = predicted[index].coordinates
            boxes.append(resize.convert(corners, response.coordinate_system, CoordinateSystem.PX_ORIGINAL))
        confidences += image_confidences[order].tolist()
        matches += _match_boxes(np.array(boxes).reshape(-1, 4), np.array(targets).reshape(-1, 4))
        num_targets += len(targets)
    is_match = np.array(matches, dtype=np.bool_).reshape(-1, len(COCO_THRESHOLDS))
    return RankedBoxes(np.array(confidences), is_match, num_targets)


def _match_boxes(boxes: NDArray[np.float64], target_boxes: NDArray[np.float64]) -> list[NDArray[np.bool_]]:
    """Match each box to the best target that is still free, at each threshold.

    Takes boxes [N, 4], the most confident first, and targets [M, 4], as x1, y1, x2, y2 in pixels. Returns N rows
    [T], True where a target was found.
    """
    is_match = np.zeros((len(boxes), len(COCO_THRESHOLDS)), dtype=np.bool_)
    if len(boxes) and len(target_boxes):
        overlaps = matching.pairwise_box_iou(boxes, target_boxes)
        for column, threshold in enumerate(COCO_THRESHOLDS):
            free = np.ones(len(target_boxes), dtype=np.bool_)
            for row, overlap in enumerate(np.where(overlaps >= threshold, overlaps, 0.0)):
                best = int(np.argmax(np.where(free, overlap, 0.0)))
                if free[best] and overlap[best] > 0.0:
                    free[best], is_match[row, column] = False, True
    return list(is_match)


def _label_average_precision(ranked: RankedBoxes) -> float:
    num_boxes = len(ranked.confidences)
    if not ranked.num_targets or not num_boxes:
        return 0.0
    order = np.argsort(-ranked.confidences, kind="mergesort")
    num_matched = np.cumsum(ranked.is_match[order], axis=0)
    precision = num_matched / np.arange(1, num_boxes + 1)[:, None]
    # Interpolated precision at a recall is the best at that recall or any higher one.
    envelope = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
    values = []
    for column in range(len(COCO_THRESHOLDS)):
        recall = num_matched[:, column] / ranked.num_targets
        positions = np.searchsorted(recall, _RECALL_POINTS, side="left")
        reached = positions < num_boxes
        values.append(np.where(reached, envelope[np.minimum(positions, num_boxes - 1), column], 0.0).mean())
    return float(np.mean(values))
