"""Rewards for one bounding box."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Annotated

from pydantic import Field

from mmrl.types import Frame, Kind, Response, Sample, Term, Unscorable
from mmrl_rewards.contract import gold, reward


@reward(name="iou")
def iou(
    response: Response, sample: Sample, *, threshold: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
) -> Term:
    """Intersection over union of the answer's box with the target's, |A & B| / |A | B|, both in px_original.

    With `threshold`, 1 if IoU >= threshold and else 0. Source: Jaccard index as in PASCAL VOC (IJCV 2010, eq. 3), the
    soft form as in VLM-R1 (arXiv:2504.07615, 3.2). Departures: coordinates are continuous, so a side is x2 - x1, not
    x2 - x1 + 1; the answer is converted from the model's frame by the resize map of the first image.

    Raises:
        Unscorable: the target is not four finite numbers with x1 < x2, y1 < y2, or has no frame or no image.
    """
    target = _target_box(response, sample)
    corners = response.answer.value
    if corners is None:
        return Term(0.0, response.answer.problems[0])
    answer = response.resizes[0].convert(corners, response.frame, Frame.PX_ORIGINAL)
    value = _overlap(answer, target)
    reason = f"IoU {value:.2f}: {_shown(answer)} vs {_shown(target)} px_original"
    if threshold is None:
        return Term(value, reason)
    return Term(float(value >= threshold), f"{reason}, threshold {threshold:g}")


def _target_box(response: Response, sample: Sample) -> tuple[float, ...]:
    box = gold(sample, Kind.BOX)
    if not isinstance(box, Sequence) or len(box) != 4 or not all(_finite(corner) for corner in box):
        raise Unscorable(f"the target {box!r} is not four finite numbers")
    if not (box[0] < box[2] and box[1] < box[3]):
        raise Unscorable(f"the target {list(box)} is inverted or empty: it must be x1 < x2, y1 < y2")
    if sample.target.frame is None:
        raise Unscorable(f"the target {list(box)} does not say what frame its coordinates are in")
    if not response.resizes:
        raise Unscorable(f"the target {list(box)} belongs to an image, and the sample has none")
    return response.resizes[0].convert(box, sample.target.frame, Frame.PX_ORIGINAL)


def _finite(corner: object) -> bool:
    return isinstance(corner, int | float) and not isinstance(corner, bool) and isfinite(corner)


def _overlap(a: Sequence[float], b: Sequence[float]) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    shared = width * height
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def _shown(box: Sequence[float]) -> list[int]:
    return [round(corner) for corner in box]
