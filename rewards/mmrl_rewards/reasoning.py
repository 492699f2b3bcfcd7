"""Rewards for the thinking: whether it points at the image, agrees with the answer, and reconsiders.

None compares with the target's value, so none shows whether an answer is correct. Combine each with a reward that does,
best as its gate. All need a response in the correct format and read only its thinking.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import Field

from mmrl.types import AnswerType, Response, RewardValue, Sample, Size, Unscorable
from mmrl_rewards import geometry
from mmrl_rewards.contract import reward, target_value

Count = Annotated[int, Field(ge=1, le=100)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Box = tuple[float, ...]

_NUMERAL = r"-?[0-9]{1,9}(?:\.[0-9]{1,9})?"
_BOX: Final = re.compile(r"\[\s{0,4}" + r"\s{0,4},\s{0,4}".join([f"({_NUMERAL})"] * 4) + r"\s{0,4}\]", re.ASCII)
_NUMBER: Final = re.compile(rf"(?<![\w.,])(?:{_NUMERAL})(?![\w]|[.,][0-9])", re.ASCII)
_LETTER: Final = re.compile(r"\(([A-Z])\)|\*\*([A-Z])\*\*|\b(?:answer|option|choice)(?: is|:)? \(?([A-Z])\b", re.ASCII)
_WORD: Final = re.compile(r"[^\W_]+")
_CHECKABLE_TYPES = (AnswerType.NUMBER, AnswerType.CHOICE, AnswerType.BOX, AnswerType.TEXT)
_SAME_BOX_IOU = 0.9  # IoU at and above which two boxes are the same answer
_ENDING_CHARS = 400  # length of the end of the thinking that is read for its conclusion
_MARKERS: Final = ("wait", "let me check", "let me re-check", "double-check", "on second thought", "hold on")
_MIN_WORDS_AFTER = 5  # words after a marker that make a reflection
_MAX_COUNTED = 5  # superfluous reflections that cost


@reward(name="thought_boxes")
def boxes(response: Response, sample: Sample, *, most: Count = 20, largest: Share = 0.9) -> RewardValue:
    """Return (valid boxes / all boxes) x agreement, in [0, 1], over the boxes [x1, y1, x2, y2] in the thinking.

    A box is valid if x1 < x2 and y1 < y2, it lies in the image, it covers at most the fraction `largest` of it, and it
    did not occur before. The boxes are compared with the response's own answer. A number agrees if it is the count of
    valid boxes. For a box, agreement is the best IoU with a valid box; for a list of boxes, the mean of that. A point
    agrees if it lies in a valid box. Other answers agree always. The value is 0 without boxes or with more than `most`.

    Source: the grounded-reasoning and counting rewards of GRIT (arXiv:2505.15879).
    Departures: syntax alone earns nothing where agreement can be checked. Agreement is with the given answer instead of
    the correct one.

    Raises:
        Unscorable: the target's value does not fit its type, or its image or video does not exist.
    """
    target_value(sample, sample.target.answer_type)
    resize = geometry.resize_map(response, sample)
    if response.answer.problems:
        return RewardValue(0.0, response.answer.problems[0])
    found = []
    for match in _first_matches(_BOX, response.answer.thinking or "", most + 1):
        found.append(tuple(map(float, match.groups())))
    if not found:
        return RewardValue(0.0, "no box in the thought")
    if len(found) > most:
        return RewardValue(0.0, f"more than {most} boxes in the thought")
    placed = [geometry.to_pixels(resize, box, response.coordinate_system) for box in found]
    valid = list(dict.fromkeys(box for box in placed if _is_valid_box(box, resize.original, largest)))
    agreement = _answer_agreement(response, sample, valid) if valid else 0.0
    value = len(valid) / len(found) * agreement
    return RewardValue(value, f"{len(valid)} of {len(found)} boxes valid, agreement with the answer {agreement:.2f}")


@reward(name="thought_consistency", answer_types=_CHECKABLE_TYPES)
def consistency(response: Response, sample: Sample) -> RewardValue:
    """Return 1 if the thinking ends with the given answer, else 0.

    The answer must equal the last number of the thinking, the last letter written as (B), **B** or "answer is B", or
    the last box at IoU >= 0.9. A text must occur as whole words. Only the last 400 characters of the thinking are read.

    Source: the consistency reward of R1-Reward (arXiv:2505.02835), which asks a judge.
    Departures: a rule decides. The paper multiplies it with the reward for the correct answer, which a gate does here.

    Raises:
        Unscorable: the target has another type, or its value does not fit its type.
    """
    kind = sample.target.answer_type
    if kind not in _CHECKABLE_TYPES:
        raise Unscorable(f"the target is a {kind}, this reward reads {', '.join(_CHECKABLE_TYPES)}")
    target_value(sample, kind)
    answer, thought = response.answer.value, response.answer.thinking
    if response.answer.problems:
        return RewardValue(0.0, response.answer.problems[0])
    if not thought:
        return RewardValue(0.0, "no thought")
    concluded, agrees = _FINAL_ANSWER_CHECKS[kind](thought[-_ENDING_CHARS:], answer)
    return RewardValue(float(agrees), f"the thought ends on {concluded!r:.40}, the answer is {answer!r:.40}")


@reward(name="reflection", low=-10.0, attack_tolerance=10 / 11)  # a response without a thought earns 0
def reflection(
    response: Response,
    sample: Sample,
    *,
    most: Count = 2,
    markers: Annotated[tuple[str, ...], Field(min_length=1)] = _MARKERS,
) -> RewardValue:
    """Return 1 for one to `most` reflections in the thinking, 0 for none, and -2 n for n superfluous ones, down to -10.

    A reflection is one of `markers`, in any case. The value is 0 unless at least one marker is followed by five or more
    words before the next and no two are followed by the same words.

    Source: VL-Rethinker's code (arXiv:2504.08837), with weight 0.1 and gated by the reward for the correct answer: +0.1
    for one or two, else -0.2 each.
    Departures: there are more markers than "wait", empty or repeated reflections earn nothing, and more than five
    superfluous ones cost no more.

    Raises:
        Unscorable: the target's value does not fit its type.
    """
    target_value(sample, sample.target.answer_type)
    if response.answer.problems:
        return RewardValue(0.0, response.answer.problems[0])
    pattern = re.compile("|".join(rf"\b{re.escape(marker)}\b" for marker in markers), re.IGNORECASE)
    _, *after = pattern.split(response.answer.thinking or "", maxsplit=_MAX_COUNTED + most)
    count = len(after)
    if count > most:
        return RewardValue(-2.0 * min(count, _MAX_COUNTED), f"{count} reflections, at most {most} are worth something")
    words_after = [tuple(_WORD.findall(text.casefold())) for text in after]
    num_full = sum(len(words) >= _MIN_WORDS_AFTER for words in words_after)
    earns = num_full > 0 and len(set(words_after)) == len(words_after)
    return RewardValue(float(earns), f"{count} reflections, {num_full} with something to say")


def _first_matches(pattern: re.Pattern[str], text: str, limit: int) -> list[re.Match[str]]:
    """Return the first `limit` matches."""
    return [match for match, _ in zip(pattern.finditer(text), range(limit), strict=False)]


def _is_valid_box(box: Box, size: Size, max_area_fraction: float) -> bool:
    """Return True if a box in px_original has an area, lies in the image and is not larger than the fraction."""
    x1, y1, x2, y2 = box
    within = 0.0 <= x1 < x2 <= size.width + 0.5 and 0.0 <= y1 < y2 <= size.height + 0.5
    return within and geometry.area(box) <= max_area_fraction * size.width * size.height


def _answer_agreement(response: Response, sample: Sample, valid_boxes: Sequence[Box]) -> float:
    """Return how well the answer agrees with the boxes of the thinking, in [0, 1].

    Args:
        response: the response.
        sample: names the type of the answer and its image.
        valid_boxes: boxes of the thinking in px_original, at least one.
    """
    answer, resize = response.answer.value, geometry.resize_map(response, sample)

    def placed(values: Sequence[float]) -> Box:
        return geometry.to_pixels(resize, values, response.coordinate_system)

    match sample.target.answer_type:
        case AnswerType.NUMBER:
            return float(answer == len(valid_boxes))
        case AnswerType.BOX:
            return max(geometry.iou(placed(answer), box) for box in valid_boxes)
        case AnswerType.BOXES:
            best = []
            for region in answer:
                answer_box = placed(region.coordinates)
                best.append(max(geometry.iou(answer_box, box) for box in valid_boxes))
            return sum(best) / len(best) if best else 0.0
        case AnswerType.POINT:
            x, y = placed(answer)
            return float(any(x1 <= x <= x2 and y1 <= y <= y2 for x1, y1, x2, y2 in valid_boxes))
        case _:
            return 1.0


def _check_final_number(thought: str, answer: float) -> tuple[Any, bool]:
    """Return the last number and whether it is the answer."""
    found = _NUMBER.findall(thought)
    return (found[-1], float(found[-1]) == answer) if found else ("no number", False)


def _check_final_letter(thought: str, answer: str) -> tuple[Any, bool]:
    """Return the last letter written as a choice and whether it is the answer."""
    found = [match[1] or match[2] or match[3] for match in _LETTER.finditer(thought)]
    return (found[-1], found[-1] == answer) if found else ("no letter", False)


def _check_final_box(thought: str, answer: Box) -> tuple[Any, bool]:
    """Return the last box and whether it is nearly the answer. Both are in the model's coordinate system."""
    found = [tuple(map(float, match.groups())) for match in _BOX.finditer(thought)]
    if not found or not (found[-1][0] < found[-1][2] and found[-1][1] < found[-1][3]):
        return "no box", False
    return found[-1], geometry.iou(found[-1], answer) >= _SAME_BOX_IOU


def _check_final_text(thought: str, answer: str) -> tuple[Any, bool]:
    """Return the end of the thinking and whether the answer occurs in it as whole words."""
    # Spaces at both ends, so that only whole words match.
    ending = f" {' '.join(_WORD.findall(thought.casefold()))} "
    words = f" {' '.join(_WORD.findall(answer.casefold()))} "
    return ending.strip()[-20:], bool(words.strip()) and words in ending


_FINAL_ANSWER_CHECKS: Final = MappingProxyType[AnswerType, Callable[[str, Any], tuple[Any, bool]]](
    {
        AnswerType.NUMBER: _check_final_number,
        AnswerType.CHOICE: _check_final_letter,
        AnswerType.BOX: _check_final_box,
        AnswerType.TEXT: _check_final_text,
    }
)
