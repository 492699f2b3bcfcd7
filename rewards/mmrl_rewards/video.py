"""Rewards for finding things in a video: boxes over time, and frames."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import floor
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import geometry, matching
from mmrl_rewards.contract import answer_value, reward, target_value

_MAX_SECONDS: Final = 1e6
_NUMERAL: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?")
BoxesByInstant = dict[int, tuple[float, ...]]


@reward(name="tube", answer_types=(AnswerType.JSON,))
def tube(response: Response, sample: Sample, *, step: Annotated[float, Field(ge=0.001)] = 1.0) -> RewardValue:
    """Return the vIoU of boxes over time, in [0, 1]: sum over S_i of IoU / |S_u|.

    S_i are the instants in both tubes and S_u those in either. Answer and target are JSON, [{"time": seconds,
    "bbox_2d": [x1, y1, x2, y2]}, ...], with a box every `step` seconds. A time stands for the nearest multiple of
    `step`.

    Source: VidSTG (arXiv:2001.06891).
    Departures: instants replace frames, because a policy writes its boxes down. Boxes are compared in px_original.
    Unscorable: the target is not such a list, is empty or has two boxes at one instant, or it has no coordinate system,
    or its image or video does not exist.
    """
    try:
        expected = _parse_tube(target_value(sample, AnswerType.JSON), step)
    except ValueError as error:
        raise Unscorable(f"the target {error}") from error
    if not expected:
        raise Unscorable("the target has no boxes")
    targets = {time: geometry.target_to_pixels(response, sample, box) for time, box in expected.items()}
    try:
        given = _parse_tube(answer_value(response), step)
    except ValueError as error:
        return RewardValue(0.0, f"the answer {error}")
    both = given.keys() & expected.keys()
    overlaps = []
    for instant in sorted(both):
        answer_box = geometry.answer_to_pixels(response, sample, given[instant])
        overlaps.append(geometry.iou(answer_box, targets[instant]))
    value = sum(overlaps) / len(given.keys() | expected.keys())
    reason = f"vIoU {value:.2f}: {len(both)} instants shared of {len(given)}, expected {len(expected)}"
    return RewardValue(value, reason)


@reward(name="frames", answer_types=(AnswerType.LIST,))
def frames(response: Response, sample: Sample, *, tolerance: Annotated[float, Field(ge=0.0)] = 0.0) -> RewardValue:
    """Return the F1 of the chosen frames (or seconds): 2 matched / (answers + targets), in [0, 1].

    Numbers are matched one to one if they differ by at most `tolerance`. Answer and target are lists of whole numbers,
    or of texts that hold decimals.

    Source: F1 over a set. Departures: a frame that is named twice counts as two.
    Unscorable: the target is not a list of at least one number.
    """
    try:
        expected = _parse_numbers(target_value(sample, AnswerType.LIST))
    except ValueError as error:
        raise Unscorable(f"the target {error}") from error
    if not len(expected):
        raise Unscorable("the target names no frames")
    try:
        given = _parse_numbers(answer_value(response))
    except ValueError as error:
        return RewardValue(0.0, f"the answer {error}")
    near = np.abs(given[:, None] - expected[None, :]) <= tolerance
    matched = matching.match_one_to_one(near.astype(np.float64))
    return RewardValue(matched.f1, f"F1 {matched.f1:.2f}: {matched.summary}")


def _parse_tube(value: object, step: float) -> BoxesByInstant:
    """Return the boxes of a tube by instant, a multiple of `step` seconds.

    Raises:
        ValueError: the value is not a list of times with boxes, or has two boxes at one instant.
    """
    if not isinstance(value, list | tuple):
        raise ValueError(f'{value!r:.80} is not [{{"time": 0.0, "bbox_2d": [x1, y1, x2, y2]}}, ...]')
    boxes: BoxesByInstant = {}
    for item in value:
        match item:
            # bool is a subclass of int.
            case {"time": int() | float() as time, "bbox_2d": box} if (
                type(time) is not bool and 0 <= time <= _MAX_SECONDS
            ):
                instant = floor(time / step + 0.5)  # round() would bring 0.5 and 1.5 to even instants
            case _:
                raise ValueError(f'{item!r:.80} is not {{"time": 0.0, "bbox_2d": [x1, y1, x2, y2]}}')
        if instant in boxes:
            raise ValueError(f"has two boxes at {instant * step:g} s")
        boxes[instant] = geometry.parse_box(box)
    return boxes


def _parse_numbers(items: Sequence[str]) -> NDArray[np.float64]:
    """Return the numbers of frames, [len(items)].

    Raises:
        ValueError: a text is not a decimal number.
    """
    for item in items:
        # float() would also read "nan", "1e9" and digits of other scripts.
        if not _NUMERAL.fullmatch(item):
            raise ValueError(f"{item!r:.80} is not the number of a frame")
    return np.array(items, dtype=np.float64)
