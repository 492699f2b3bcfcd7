"""How RefCOCO is scored by VLM-R1, ScreenSpot by its authors, and detection by COCO.

Sources: src/eval/test_rec_r1.py of github.com/om-ai-lab/VLM-R1 (arXiv:2504.07615); ScreenSpot (arXiv:2401.10935) and
ScreenSpot-Pro (arXiv:2504.07981); COCO's average precision (cocodataset.org, as pycocotools computes it). Departures:
coordinates are converted by the resize map of the picture, never by a guess from their size; COCO's crowd regions are
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
_RECALL_POINTS: Final = np.linspace(0.0, 1.0, 101)
_MAX_BOXES: Final = 100  # boxes of one label in one picture


def score_refcoco(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """VLM-R1: the last box of whole numbers between braces in the answer tags, IoU of pixels both ends included, above
    0.5.
    """
    answer = first_answer_tag(response.text) or ""
    inner = answer[answer.find("{") : answer.rfind("}")] if "{" in answer and "}" in answer else ""
    boxes = _INTEGER_BOX.findall(inner)
    if not boxes:
        return 0.0
    corners = [float(number) for number in boxes[-1]]
    resize = image_resize_map(item, response)
    given = resize.convert(corners, response.coordinate_system, CoordinateSystem.PX_ORIGINAL)
    due = resize.convert(item.answer, item.coordinate_system, CoordinateSystem.PX_ORIGINAL)
    return float(pixel_iou(given, due) > 0.5)


def pixel_iou(a: Sequence[float], b: Sequence[float]) -> float:
    """VLM-R1's overlap: the shared part counts its last pixel, the areas do not."""
    width = min(a[2] - 1, b[2] - 1) - max(a[0], b[0])
    height = min(a[3] - 1, b[3] - 1) - max(a[1], b[1])
    shared = (width + 1) * (height + 1) if width > 0 and height > 0 else 0.0
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return shared / union if union > 0 else 0.0


def score_screenspot(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """ScreenSpot: the point lies in the box; where none can be read, the point is the top left corner."""
    if extraction.regions:
        return float(is_point_in_box(item, response, extraction))
    x1, y1, _, _ = item.answer
    return float(x1 <= 0 and y1 <= 0)


class RankedBoxes(NamedTuple):
    """Boxes of one label over all pictures: how sure, and at which thresholds each found a target, (N,) and (N, T)."""

    confidences: NDArray[np.float64]
    is_match: NDArray[np.bool_]
    num_targets: int


def average_precision(results: Sequence[tuple[Item, ItemResponse, Extraction]]) -> float:
    """COCO's AP over pictures: mean over labels and ten thresholds of precision interpolated at 101 recalls."""
    labels = sorted({region.label for item, _, _ in results for region in item.answer})
    values = [_label_average_precision(_rank_boxes(results, label)) for label in labels]
    return float(np.mean(values)) if values else 0.0


def _rank_boxes(results: Sequence[tuple[Item, ItemResponse, Extraction]], label: str) -> RankedBoxes:
    confidences: list[float] = []
    rows: list[NDArray[np.bool_]] = []
    targets = 0
    for item, response, found in results:
        resize = image_resize_map(item, response)
        due = [
            resize.convert(one.coordinates, item.coordinate_system, CoordinateSystem.PX_ORIGINAL)
            for one in item.answer
            if one.label == label
        ]
        given = [one for one in found.regions if one.label == label]
        sure = np.array([1.0 if one.confidence is None else one.confidence for one in given])
        order = np.argsort(-sure, kind="mergesort")[:_MAX_BOXES]
        boxes = [
            resize.convert(given[place].coordinates, response.coordinate_system, CoordinateSystem.PX_ORIGINAL)
            for place in order
        ]
        confidences += sure[order].tolist()
        rows += _match_boxes(np.array(boxes).reshape(-1, 4), np.array(due).reshape(-1, 4))
        targets += len(due)
    return RankedBoxes(np.array(confidences), np.array(rows, dtype=np.bool_).reshape(-1, len(COCO_THRESHOLDS)), targets)


def _match_boxes(boxes: NDArray[np.float64], target_boxes: NDArray[np.float64]) -> list[NDArray[np.bool_]]:
    """For each box, surest first, whether it finds the best target still free, at each threshold."""
    found = np.zeros((len(boxes), len(COCO_THRESHOLDS)), dtype=np.bool_)
    if len(boxes) and len(target_boxes):
        overlaps = matching.pairwise_box_iou(boxes, target_boxes)
        for column, threshold in enumerate(COCO_THRESHOLDS):
            free = np.ones(len(target_boxes), dtype=np.bool_)
            for row, overlap in enumerate(np.where(overlaps >= threshold, overlaps, 0.0)):
                best = int(np.argmax(np.where(free, overlap, 0.0)))
                if free[best] and overlap[best] > 0.0:
                    free[best], found[row, column] = False, True
    return [*found]


def _label_average_precision(ranked: RankedBoxes) -> float:
    if not ranked.num_targets:
        return 0.0
    order = np.argsort(-ranked.confidences, kind="mergesort")
    right = np.cumsum(ranked.is_match[order], axis=0)
    precision = right / np.arange(1, len(order) + 1)[:, None]
    falling = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
    values = []
    for column in range(len(COCO_THRESHOLDS)):
        places = np.searchsorted(right[:, column] / ranked.num_targets, _RECALL_POINTS, side="left")
        values.append(
            np.where(places < len(order), falling[np.minimum(places, len(order) - 1), column], 0.0).mean()
            if len(order)
            else 0.0
        )
    return float(np.mean(values))
