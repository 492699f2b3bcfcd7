"""Rewards for the thinking: whether it points at the image, agrees with the answer, and reconsiders.

No reward here compares with the target's value, so none shows whether an answer is correct. Combine each with a reward
that does, preferably as a gate. All need a response in the correct format and read only its thinking.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, Final

from pydantic import Field

from mmrl.answer import AnswerValue
from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import geometry
from mmrl_rewards.contract import Of, part_text, reward, target_value

Count = Annotated[int, Field(ge=1, le=100)]
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
_LARGEST_FINE = 11.0  # with weight 0.1, a correct answer falls to -0.1 at most
_MAX_COUNTED = 6  # superfluous reflections that cost


@reward(name="thought_boxes", judges_answer=False)
def boxes(response: Response, sample: Sample, *, most: Count = 20, largest: geometry.Share = 0.9) -> RewardValue:
    """Return (valid boxes / all boxes) x agreement, in [0, 1], over the boxes [x1, y1, x2, y2] in the thinking.

    A box is valid if x1 < x2 and y1 < y2, it lies in the image, it covers at most the fraction `largest` of it, and it
    did not occur before. The boxes are compared with the response's own answer. A number agrees if it is the count of
    valid boxes. For a box, agreement is the best IoU with a valid box; for a list of boxes, the mean of that. A point
    agrees if it lies in a valid box. Other answers agree always. The value is 0 without boxes or with more than `most`.

    Source: the grounded-reasoning and counting rewards of GRIT (arXiv:2505.15879).
    Departures: syntax alone earns nothing where agreement can be checked. Agreement is with the given answer instead of
    the correct one.
    Unscorable: the target's value does not fit its type, or its image or video does not exist.
    """
    target_value(sample, sample.target.answer_type)
    image = geometry.resize_map(response, sample).original
    if response.answer.problems:
        return RewardValue(0.0, response.answer.problems[0])
    # One more than is allowed shows that there are too many. A thought may list thousands.
    matches = islice(_BOX.finditer(response.answer.thinking or ""), most + 1)
    found = [tuple(map(float, match.groups())) for match in matches]
    if not found:
        return RewardValue(0.0, "no box in the thought")
    if len(found) > most:
        return RewardValue(0.0, f"more than {most} boxes in the thought")
    # A dictionary keeps the order and drops repetitions.
    valid: dict[Box, None] = {}
    for numbers in found:
        x1, y1, x2, y2 = box = geometry.answer_to_pixels(response, sample, numbers)
        # Half a pixel of slack, for coordinates that were rounded up to the far edge.
        inside = 0.0 <= x1 < x2 <= image.width + 0.5 and 0.0 <= y1 < y2 <= image.height + 0.5
        if inside and geometry.area(box) <= largest * image.width * image.height:
            valid[box] = None
    agreement = _answer_agreement(response, sample, list(valid)) if valid else 0.0
    value = len(valid) / len(found) * agreement
    return RewardValue(value, f"{len(valid)} of {len(found)} boxes valid, agreement with the answer {agreement:.2f}")


@reward(name="thought_consistency", judges_answer=False, answer_types=_CHECKABLE_TYPES)
def consistency(response: Response, sample: Sample) -> RewardValue:
    """Return 1 if the thinking ends with the given answer, else 0.

    The answer must equal the last number of the thinking, the last letter written as (B), **B** or "answer is B", or
    the last box at IoU >= 0.9. A text must occur as whole words. Only the last 400 characters of the thinking are read.

    Source: the consistency reward of R1-Reward (arXiv:2505.02835), which asks a judge.
    Departures: a rule decides. The paper multiplies it with the reward for the correct answer, which a gate does here.
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
    concluded, agrees = _read_conclusion(kind, thought[-_ENDING_CHARS:], answer)
    return RewardValue(float(agrees), f"the thought ends on {concluded!r:.40}, the answer is {answer!r:.40}")


# A response without a thought earns 0, which is far above the lowest value.
@reward(name="reflection", judges_answer=False, low=-_LARGEST_FINE, attack_tolerance=11 / 12)
def reflection(
    response: Response,
    sample: Sample,
    *,
    most: Count = 2,
    markers: Annotated[tuple[str, ...], Field(min_length=1)] = _MARKERS,
    of: Of = "thought",
) -> RewardValue:
    """Return 1 for one to `most` reflections, 0 for none, and -2 n for n where that is too many, down to -11.

    A reflection is one of `markers`, in any case, in the part of the response that `of` names. The value is 0 unless at
    least one marker is followed by five or more words before the next and no two are followed by the same words.

    Source: VL-Rethinker's code (arXiv:2504.08837), with weight 0.1 and gated by the reward for the correct answer: +0.1
    for one or two, else -0.2 each, down to a total of -0.1.
    Departures: there are more markers than "wait", and empty or repeated reflections earn nothing.
    Unscorable: the target's value does not fit its type.
    """
    target_value(sample, sample.target.answer_type)
    if response.answer.problems:
        return RewardValue(0.0, response.answer.problems[0])
    text = (response.answer.thinking or "") if of == "thought" else part_text(response, of)
    # A marker is not part of a word, and may end in a comma.
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(marker)}(?!\w)" for marker in markers), re.IGNORECASE)
    # maxsplit, because further reflections do not increase the fine.
    _, *after = pattern.split(text, maxsplit=_MAX_COUNTED + most)
    count = len(after)
    if count > most:
        fine = min(2.0 * count, _LARGEST_FINE)
        return RewardValue(-fine, f"{count} reflections, at most {most} are worth something")
    words_after = [tuple(_WORD.findall(text.casefold())) for text in after]
    num_full = sum(len(words) >= _MIN_WORDS_AFTER for words in words_after)
    earns = num_full > 0 and len(set(words_after)) == len(words_after)
    return RewardValue(float(earns), f"{count} reflections, {num_full} with something to say")


def _answer_agreement(response: Response, sample: Sample, valid_boxes: Sequence[Box]) -> float:
    """Return how well the answer agrees with `valid_boxes`, the boxes of the thinking in px_original, in [0, 1]."""
    answer = response.answer.value
    match sample.target.answer_type:
        case AnswerType.NUMBER:
            return float(answer == len(valid_boxes))
        case AnswerType.BOX:
            answer_box = geometry.answer_to_pixels(response, sample, answer)
            return max(geometry.iou(answer_box, box) for box in valid_boxes)
        case AnswerType.BOXES:
            best = []
            for region in answer:
                answer_box = geometry.answer_to_pixels(response, sample, region.coordinates)
                best.append(max(geometry.iou(answer_box, box) for box in valid_boxes))
            return sum(best) / len(best) if best else 0.0
        case AnswerType.POINT:
            point = geometry.answer_to_pixels(response, sample, answer)
            return float(any(geometry.point_in_box(point, box) for box in valid_boxes))
        case _:
            return 1.0


def _read_conclusion(answer_type: AnswerType, ending: str, answer: AnswerValue) -> tuple[Any, bool]:
    """Return the answer on which the thinking ends, and True if it is the given one. `ending` is its last part."""
    match answer_type:
        case AnswerType.NUMBER:
            numbers = _NUMBER.findall(ending)
            return (numbers[-1], float(numbers[-1]) == answer) if numbers else ("no number", False)
        case AnswerType.CHOICE:
            letters = [match[1] or match[2] or match[3] for match in _LETTER.finditer(ending)]
            return (letters[-1], letters[-1] == answer) if letters else ("no letter", False)
        case AnswerType.BOX:
            # Both boxes are in the model's coordinate system, so neither is converted.
            boxes = [tuple(map(float, match.groups())) for match in _BOX.finditer(ending)]
            if not boxes or not (boxes[-1][0] < boxes[-1][2] and boxes[-1][1] < boxes[-1][3]):
                return "no box", False
            return boxes[-1], geometry.iou(boxes[-1], answer) >= _SAME_BOX_IOU
        case _:
            # Spaces at both ends, so that only whole words match.
            text = f" {' '.join(_WORD.findall(ending.casefold()))} "
            words = f" {' '.join(_WORD.findall(answer.casefold()))} "
            return text.strip()[-20:], bool(words.strip()) and words in text
