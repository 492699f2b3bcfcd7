"""Official rules of grounding benchmarks: RefCOCO as VLM-R1 scores it, ScreenSpot, and COCO's average precision.

Sources: src/eval/test_rec_r1.py of github.com/om-ai-lab/VLM-R1 (arXiv:2504.07615); ScreenSpot (arXiv:2401.10935) and
ScreenSpot-Pro (arXiv:2504.07981); COCO's average precision (cocodataset.org, as pycocotools computes it). Departures:
coordinates are converted by the resize map of the image, never by a guess from their size; COCO's crowd regions are
not among the targets, and all areas count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mmrl.benchmarks.benchmark import GradedResponse
from mmrl.benchmarks.extraction.match import boxes_in_pixels, image_resize_map, is_point_in_box
from mmrl.benchmarks.extraction.text import Extraction, first_answer_tag
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.types import CoordinateSystem, Region, ResizeMap
from mmrl_rewards import matching
from mmrl_rewards.detect import interpolated_precision
from mmrl_rewards.geometry import COCO_THRESHOLDS

_INTEGER_BOX: Final = re.compile(r"\[(\d{1,9}),\s{0,9}(\d{1,9}),\s{0,9}(\d{1,9}),\s{0,9}(\d{1,9})\]")
_IOU_THRESHOLD: Final = 0.5
_MAX_BOXES: Final = 100  # boxes of one label in one image that count, the most confident first; COCO's maxDets


def score_refcoco(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Score as VLM-R1: IoU above 0.5 of the last box of whole numbers between braces in the answer tags."""
    answer = first_answer_tag(response.text) or ""
    inner = answer[answer.find("{") : answer.rfind("}")] if "{" in answer and "}" in answer else ""
    boxes = _INTEGER_BOX.findall(inner)
    if not boxes:
        return 0.0
    predicted, target = boxes_in_pixels(item, response, list(map(float, boxes[-1])))
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


def average_precision(results: Sequence[GradedResponse]) -> float:
    """Return COCO's AP: the mean over labels and ten IoU thresholds of precision interpolated at 101 recalls."""
    labels = sorted({region.label for item, _, _ in results for region in item.answer})
    return fmean(_label_precision(results, label) for label in labels) if labels else 0.0


def _label_precision(results: Sequence[GradedResponse], label: str) -> float:
    """Return the AP of one label over all images, averaged over the thresholds."""
    confidences: list[float] = []
    is_match: list[NDArray[np.bool_]] = []  # for each box, True where it found a target at the threshold
    num_targets = 0
    for item, response, extraction in results:
        # A stable sort, as pycocotools uses: equal confidences keep the order of the response.
        predicted = [region for region in extraction.regions if region.label == label]
        predicted = sorted(predicted, key=_confidence, reverse=True)[:_MAX_BOXES]
        targets = [region for region in item.answer if region.label == label]
        resize = image_resize_map(item, response)
        boxes = _to_pixels(predicted, resize, response.coordinate_system)
        is_match += _match_boxes(boxes, _to_pixels(targets, resize, item.coordinate_system))
        confidences += map(_confidence, predicted)
        num_targets += len(targets)
    ranking = sorted(range(len(is_match)), key=lambda index: confidences[index], reverse=True)
    precisions = []
    for column in range(len(COCO_THRESHOLDS)):
        hits = [rank for rank, index in enumerate(ranking, 1) if is_match[index][column]]
        precisions.append(interpolated_precision(hits, num_targets))
    return fmean(precisions)


def _confidence(region: Region) -> float:
    return 1.0 if region.confidence is None else region.confidence


def _to_pixels(regions: Sequence[Region], resize: ResizeMap, source: CoordinateSystem) -> NDArray[np.float64]:
    """Return the boxes [N, 4] in pixels of the original image."""
    boxes = [resize.convert(region.coordinates, source, CoordinateSystem.PX_ORIGINAL) for region in regions]
    return np.array(boxes).reshape(-1, 4)


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
