"""Rewards for one bounding box. Answer and target are compared in px_original."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import geometry
from mmrl_rewards.contract import reward, target_value

Floor = Annotated[float, Field(ge=-1.0, lt=1.0)]


@reward(name="iou", answer_types=(AnswerType.BOX,))
def iou(response: Response, sample: Sample, *, threshold: geometry.Threshold | None = None) -> RewardValue:
    """Intersection over union of the answer's box with the target's, |A & B| / |A | B|.

    With `threshold`, 1 if IoU >= threshold and else 0. Source: Jaccard index as in PASCAL VOC (IJCV 2010, eq. 3), the
    soft form as in VLM-R1 (arXiv:2504.07615, 3.2). Departures: coordinates are continuous, so a side is x2 - x1, not
    x2 - x1 + 1; the answer is converted from the model's frame by the resize map of the target's medium.

    Raises:
        Unscorable: the target is not four finite numbers with x1 < x2, y1 < y2, or has no frame or no medium.
    """
    return _score_boxes(response, sample, "IoU", geometry.iou, lambda value: geometry.apply_threshold(value, threshold))


@reward(name="iou_ladder", answer_types=(AnswerType.BOX,))
def ladder(
    response: Response, sample: Sample, *, thresholds: geometry.Thresholds = geometry.COCO_THRESHOLDS
) -> RewardValue:
    """The share of `thresholds` that IoU reaches, (1/n) sum_i 1[IoU >= t_i].

    Source: the ten thresholds over which COCO averages (arXiv:1405.0312; cocodataset.org, detection evaluation).
    Departures: for one box there is no precision to average, only whether it is found at each threshold.

    Raises:
        Unscorable: as `iou`.
    """
    return _score_boxes(
        response, sample, "IoU", geometry.iou, lambda value: sum(value >= t for t in thresholds) / len(thresholds)
    )


@reward(name="giou", answer_types=(AnswerType.BOX,))
def giou(response: Response, sample: Sample, *, floor: Floor = 0.0) -> RewardValue:
    """max(0, (GIoU - floor) / (1 - floor)), GIoU = IoU - (1 - |A | B| / |C|), C the smallest box around both.

    Source: generalised IoU (arXiv:1902.09630, algorithm 1); Visual-RFT's grounding reward GIoU + 1 (arXiv:2503.01785)
    is twice this with floor -1. Departures: in [0, 1]; by default disjoint boxes earn nothing, for below 0 a box around
    the whole picture earns more than a near miss, at floor -1 half of all there is.

    Raises:
        Unscorable: as `iou`.
    """
    return _score_boxes(response, sample, "GIoU", geometry.giou, lambda value: _rescale_above(value, floor))


@reward(name="diou", answer_types=(AnswerType.BOX,))
def diou(response: Response, sample: Sample, *, floor: Floor = 0.0) -> RewardValue:
    """max(0, (DIoU - floor) / (1 - floor)), DIoU = IoU - d^2 / c^2: distance of centres over diagonal of the hull.

    Source: distance IoU (arXiv:1911.08287, eq. 7). Departures: in [0, 1]; a floor below 0 pays near misses, and a box
    around the whole picture with them, up to half at floor -1.

    Raises:
        Unscorable: as `iou`.
    """
    return _score_boxes(response, sample, "DIoU", geometry.diou, lambda value: _rescale_above(value, floor))


@reward(name="referring", answer_types=(AnswerType.JSON,))
def referring(response: Response, sample: Sample, *, threshold: geometry.Threshold | None = None) -> RewardValue:
    """IoU if the answer's box is in the right one of several images, else 0; with `threshold`, 1 if it is reached.

    Answer and target are JSON, {"image": 2, "bbox_2d": [x1, y1, x2, y2]}; images and videos count from 1 in reading
    order, and each box is converted by the map of its own. Source: IoU as in `iou`; the medium as a condition is this
    library's rule. Departures: none.

    Raises:
        Unscorable: the target is not such an object, names a medium the sample lacks, or has no frame.
    """
    try:
        target_image, target = _parse_image_box(target_value(sample, AnswerType.JSON))
    except ValueError as error:
        raise Unscorable(f"the target {error}") from error
    resize = geometry.resize_map(response, sample, target_image - 1)
    expected = geometry.to_pixels(resize, target, geometry.target_coordinate_system(sample))
    if response.answer.value is None:
        return RewardValue(0.0, response.answer.problems[0])
    try:
        image, corners = _parse_image_box(response.answer.value)
    except ValueError as error:
        return RewardValue(0.0, f"the answer {error}")
    if image != target_image:
        return RewardValue(0.0, f"image {image!r:.20}, expected {target_image}")
    answer = geometry.to_pixels(resize, corners, response.coordinate_system)
    value = geometry.iou(answer, expected)
    boxes = f"{geometry.format_coordinates(answer)} vs {geometry.format_coordinates(expected)}"
    reason = f"image {image}, IoU {value:.2f}: {boxes} px_original"
    return RewardValue(geometry.apply_threshold(value, threshold), reason)


def _score_boxes(
    response: Response,
    sample: Sample,
    name: str,
    measure: Callable[[Sequence[float], Sequence[float]], float],
    grade: Callable[[float], float],
) -> RewardValue:
    """Return `grade` of the value that `measure` gives the answer's box and the target's."""
    corners = target_value(sample, AnswerType.BOX)
    resize = geometry.resize_map(response, sample)
    target = geometry.to_pixels(resize, corners, geometry.target_coordinate_system(sample))
    if response.answer.value is None:
        return RewardValue(0.0, response.answer.problems[0])
    answer = geometry.to_pixels(resize, response.answer.value, response.coordinate_system)
    value = measure(answer, target)
    boxes = f"{geometry.format_coordinates(answer)} vs {geometry.format_coordinates(target)}"
    return RewardValue(grade(value), f"{name} {value:.2f}: {boxes} px_original")


def _rescale_above(value: float, floor: float) -> float:
    return min(1.0, max(0.0, (value - floor) / (1.0 - floor)))


def _parse_image_box(value: object) -> tuple[int, tuple[float, ...]]:
    """Return the index of an image and a box in it, from parsed JSON."""
    match value:
        case {"image": int(image), "bbox_2d": box} if not isinstance(image, bool):
            return image, geometry.parse_box(box)
        case _:
            raise ValueError(f'{value!r:.80} is not {{"image": 1, "bbox_2d": [x1, y1, x2, y2]}}')
