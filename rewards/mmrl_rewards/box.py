"""Rewards for one bounding box. Answer and target are compared in px_original."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field

from mmrl.types import AnswerType, Response, RewardValue, Sample
from mmrl_rewards import geometry
from mmrl_rewards.contract import answer_value, parse_part, parse_target, rescale_above, reward, target_value

# Value of GIoU or DIoU, in [-1, 1), at and below which a box earns nothing.
Floor = Annotated[float, Field(ge=-1.0, lt=1.0)]


@reward(name="iou", answer_types=(AnswerType.BOX,))
def iou(response: Response, sample: Sample, *, threshold: geometry.Threshold | None = None) -> RewardValue:
    """Return the intersection over union of the answer's box and the target's, |A & B| / |A | B|, in [0, 1].

    With `threshold`, in (0, 1], the value is 1 if IoU >= threshold and else 0.

    Source: Jaccard index as in PASCAL VOC (IJCV 2010, eq. 3); the soft form as in VLM-R1 (arXiv:2504.07615, 3.2).
    Departures: coordinates are continuous, so a side is x2 - x1, not x2 - x1 + 1. The answer is converted from the
    model's coordinate system by the resize map of the target's image.
    Unscorable: the target is not four finite numbers with x1 < x2 and y1 < y2, or it has no coordinate system, or its
    image or video does not exist.
    """
    overlap, reason = _measure_boxes(response, sample, "IoU", geometry.iou)
    return RewardValue(overlap if threshold is None else float(overlap >= threshold), reason)


@reward(name="iou_ladder", answer_types=(AnswerType.BOX,))
def ladder(
    response: Response, sample: Sample, *, thresholds: geometry.Thresholds = geometry.COCO_THRESHOLDS
) -> RewardValue:
    """Return the fraction of `thresholds`, each in (0, 1], that IoU reaches: (1/n) sum_i 1[IoU >= t_i].

    Source: the ten thresholds over which COCO averages (arXiv:1405.0312; cocodataset.org, detection evaluation).
    Departures: one box has no precision to average, so each threshold counts 1 or 0.
    Unscorable: the target is invalid, see `iou`.
    """
    overlap, reason = _measure_boxes(response, sample, "IoU", geometry.iou)
    num_reached = sum(overlap >= threshold for threshold in thresholds)
    return RewardValue(num_reached / len(thresholds), reason)


@reward(name="giou", answer_types=(AnswerType.BOX,))
def giou(response: Response, sample: Sample, *, floor: Floor = 0.0) -> RewardValue:
    """Return max(0, (GIoU - floor) / (1 - floor)), GIoU = IoU - (1 - |A | B| / |C|), C the smallest box around both.

    Source: generalised IoU (arXiv:1902.09630, algorithm 1). Visual-RFT's grounding reward GIoU + 1 (arXiv:2503.01785)
    is twice this value at floor -1.
    Departures: the range is [0, 1]. Disjoint boxes earn nothing by default, because with a floor below 0 a box around
    the whole image earns more than a near miss: half of the maximum at floor -1.
    Unscorable: the target is invalid, see `iou`.
    """
    overlap, reason = _measure_boxes(response, sample, "GIoU", geometry.giou)
    return RewardValue(rescale_above(overlap, floor), reason)


@reward(name="diou", answer_types=(AnswerType.BOX,))
def diou(response: Response, sample: Sample, *, floor: Floor = 0.0) -> RewardValue:
    """Return max(0, (DIoU - floor) / (1 - floor)), DIoU = IoU - d^2 / c^2.

    d is the distance of the two centres and c the diagonal of the smallest box around both.

    Source: distance IoU (arXiv:1911.08287, eq. 7).
    Departures: the range is [0, 1]. A floor below 0 rewards near misses, but also a box around the whole image, with up
    to half of the maximum at floor -1.
    Unscorable: the target is invalid, see `iou`.
    """
    overlap, reason = _measure_boxes(response, sample, "DIoU", geometry.diou)
    return RewardValue(rescale_above(overlap, floor), reason)


@reward(name="referring", answer_types=(AnswerType.JSON,))
def referring(response: Response, sample: Sample, *, threshold: geometry.Threshold | None = None) -> RewardValue:
    """Return IoU if the answer names the target's image among several, else 0. With `threshold`, 1 if IoU reaches it.

    Answer and target are JSON, {"image": 2, "bbox_2d": [x1, y1, x2, y2]}. Images and videos count from 1 in reading
    order. Boxes are converted by the resize map of the image they name.

    Source: IoU as in `iou`; the condition on the image is this library's own rule. Departures: none.
    Unscorable: the target is not such an object, names an image that the sample lacks, or has no coordinate system.
    """
    target_image, target = parse_target(sample, AnswerType.JSON, _parse_image_box)
    # The image that the target names, which need not be the one that the sample's target lies in.
    expected = geometry.target_to_pixels(response, sample, target, target_image - 1)
    image, corners = parse_part(response, AnswerType.JSON, _parse_image_box)
    if image != target_image:
        return RewardValue(0.0, f"image {image!r:.20}, expected {target_image}")
    answer = geometry.answer_to_pixels(response, sample, corners, target_image - 1)
    value = geometry.iou(answer, expected)
    reason = f"image {image}, IoU {value:.2f}: {geometry.format_pair(answer, expected)}"
    return RewardValue(value if threshold is None else float(value >= threshold), reason)


def _measure_boxes(
    response: Response, sample: Sample, name: str, measure: Callable[[Sequence[float], Sequence[float]], float]
) -> tuple[float, str]:
    """Return `measure` of the answer's box and the target's in px_original, and a reason that shows both."""
    # The target comes first: a sample that is broken has to be unscorable for every response.
    target = geometry.target_to_pixels(response, sample, target_value(sample, AnswerType.BOX))
    answer = geometry.answer_to_pixels(response, sample, answer_value(response))
    value = measure(answer, target)
    return value, f"{name} {value:.2f}: {geometry.format_pair(answer, target)}"


def _parse_image_box(value: object) -> tuple[int, tuple[float, ...]]:
    """Return the number of an image, from 1, and a box in it, from parsed JSON.

    Raises:
        ValueError: the value is not such an object or the box is invalid.
    """
    match value:
        # int() also matches True and False.
        case {"image": int(image), "bbox_2d": box} if not isinstance(image, bool):
            return image, geometry.parse_box(box)
        case _:
            raise ValueError(f'{value!r:.80} is not {{"image": 1, "bbox_2d": [x1, y1, x2, y2]}}')
