"""Rewards for finding things in a video: boxes over time, and frames."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from math import ceil, floor
from typing import Annotated, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from mmrl.answer import is_number
from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import geometry, matching
from mmrl_rewards.contract import BadAnswer, Of, parse_part, parse_target, part_value, reward, target_value

_MAX_SECONDS: Final = 1e6
_MAX_SPAN_INSTANTS: Final = 10_000
_NUMERAL: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?")
BoxesByInstant = dict[int, tuple[float, ...]]
Step = Annotated[float, Field(ge=0.001)]  # seconds from one instant to the next


@reward(name="tube", answer_types=(AnswerType.JSON,))
def tube(
    response: Response,
    sample: Sample,
    *,
    step: Step = 1.0,
    over: Literal["union", "target"] = "union",
    of: Of = "answer",
) -> RewardValue:
    """Return the vIoU of boxes over time, in [0, 1]: sum over S_i of IoU / |S_u|.

    S_i are the instants in both tubes and S_u those in either. Answer and target are JSON, [{"time": seconds,
    "bbox_2d": [x1, y1, x2, y2]}, ...], with a box every `step` seconds. A time stands for the nearest multiple of
    `step`. With `over: target` the sum is divided by the number of the target's instants: the value is
    their mean IoU, and boxes at other instants do not matter. `of` names the part of the response that is compared.

    Source: VidSTG (arXiv:2001.06891); `over: target`, of answer and of thought, stands for the spatial reward of
    STVG-o1 (arXiv:2511.21375, equations 7 and 8).
    Departures: instants replace frames, because a policy writes its boxes down. Boxes are compared in px_original.
    STVG-o1 takes GIoU less the L1 distance over the instants in both spans, where `over: target` takes IoU over all of
    the target's.
    Unscorable: the target is not such a list, is empty or has two boxes at one instant, or it has no coordinate system,
    or its image or video does not exist.
    """
    expected = _target_boxes(sample, step)
    targets = {time: geometry.target_to_pixels(response, sample, box) for time, box in expected.items()}
    given = parse_part(response, AnswerType.JSON, partial(_parse_tube, step=step), of)
    both = given.keys() & expected.keys()
    overlaps = []
    for instant in sorted(both):
        answer_box = geometry.answer_to_pixels(response, sample, given[instant])
        overlaps.append(geometry.iou(answer_box, targets[instant]))
    value = sum(overlaps) / len(expected if over == "target" else given.keys() | expected.keys())
    reason = f"vIoU {value:.2f}: {len(both)} instants shared of {len(given)}, expected {len(expected)}"
    return RewardValue(value, reason)


@reward(name="tube_span", answer_types=(AnswerType.JSON,))
def span(response: Response, sample: Sample, *, of: Of, step: Step = 1.0) -> RewardValue:
    """Return the temporal IoU of a span and the target's tube, |S_i| / |S_u|, in [0, 1].

    S_i are the instants, multiples of `step` seconds, in both, and S_u those in either. The part `of` of the response
    is the span, [start, end] in seconds; the target is as in `tube`.

    Source: the temporal reward of STVG-o1 (arXiv:2511.21375). Departures: instants replace frames, as in `tube`.
    Unscorable: the target is not a list of boxes with times, is empty or has two boxes at one instant.
    """
    expected = _target_boxes(sample, step)
    given = _given_instants(response, of, step)
    shared = len(given & expected.keys())
    value = shared / len(given | expected.keys())
    return RewardValue(value, f"tIoU {value:.2f}: {shared} instants shared of {len(given)}, expected {len(expected)}")


@reward(name="tube_consistency", answer_types=(AnswerType.JSON,), judges_answer=False)
def consistency(response: Response, sample: Sample, *, of: Of, step: Step = 1.0) -> RewardValue:
    """Return 1 if thought and answer both have a box for each instant of the response's span, and for no other, else 0.

    The part `of` is the span, as in `span`; thought and answer are boxes over time, as in `tube`.

    Source: the consistency reward of STVG-o1 (arXiv:2511.21375). Departures: instants replace frames, as in `tube`.
    Unscorable: the target is not JSON.
    """
    target_value(sample, AnswerType.JSON)
    instants = _given_instants(response, of, step)
    for part in ("thought", "answer"):
        given = parse_part(response, AnswerType.JSON, partial(_parse_tube, step=step), part)
        if given.keys() != instants:
            return RewardValue(0.0, f"{part} has {len(given)} instants, {of} has {len(instants)}, or they are others")
    return RewardValue(1.0, f"{len(instants)} instants in thought, answer and {of}")


@reward(name="frames", answer_types=(AnswerType.LIST,))
def frames(response: Response, sample: Sample, *, tolerance: Annotated[float, Field(ge=0.0)] = 0.0) -> RewardValue:
    """Return the F1 of the chosen frames (or seconds): 2 matched / (answers + targets), in [0, 1].

    Numbers are matched one to one if they differ by at most `tolerance`. Answer and target are lists of whole numbers,
    or of texts that hold decimals.

    Source: F1 over a set. Departures: a frame that is named twice counts as two.
    Unscorable: the target is not a list of at least one number.
    """
    expected = parse_target(sample, AnswerType.LIST, _parse_numbers)
    if not len(expected):
        raise Unscorable("the target names no frames")
    given = parse_part(response, AnswerType.LIST, _parse_numbers)
    near = np.abs(given[:, None] - expected[None, :]) <= tolerance
    matched = matching.match_one_to_one(near.astype(np.float64))
    return RewardValue(matched.f1, f"F1 {matched.f1:.2f}: {matched.summary}")


def _target_boxes(sample: Sample, step: float) -> BoxesByInstant:
    """Return the target's boxes by instant; raises Unscorable if it is not a tube, or has no box."""
    boxes = parse_target(sample, AnswerType.JSON, partial(_parse_tube, step=step))
    if not boxes:
        raise Unscorable("the target has no boxes")
    return boxes


def _given_instants(response: Response, of: Of, step: float) -> set[int]:
    """Return the instants within a span of the response; raises BadAnswer if there is none, or far too many."""
    start, end = part_value(response, AnswerType.SPAN, of)
    if end - start > _MAX_SPAN_INSTANTS * step:
        raise BadAnswer(f"{of} lasts for more than {_MAX_SPAN_INSTANTS} instants")
    instants = set(range(ceil(start / step - 1e-6), floor(end / step + 1e-6) + 1))  # 0.6 / 0.2 is 2.999
    if not instants:
        raise BadAnswer(f"no instant from {start:g} to {end:g} s")
    return instants


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
            case {"time": time, "bbox_2d": box} if is_number(time) and 0 <= time <= _MAX_SECONDS:
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
