"""Rewards for the thinking: does it point at the picture, does it lead to the answer, does it reconsider.

None looks at the target's value, so none says whether an answer is right: each earns its keep only beside a reward that
does, best gated by it. All want a response as asked, and read the thought alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import Field

from mmrl.types import Kind, Response, Sample, Size, Term, Unscorable
from mmrl_rewards import geometry
from mmrl_rewards.contract import gold, reward

Count = Annotated[int, Field(ge=1, le=100)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Box = tuple[float, ...]

_NUMERAL = r"-?[0-9]{1,9}(?:\.[0-9]{1,9})?"
_BOX: Final = re.compile(r"\[\s{0,4}" + r"\s{0,4},\s{0,4}".join([f"({_NUMERAL})"] * 4) + r"\s{0,4}\]", re.ASCII)
_NUMBER: Final = re.compile(rf"(?<![\w.,])(?:{_NUMERAL})(?![\w]|[.,][0-9])", re.ASCII)
_LETTER: Final = re.compile(r"\(([A-Z])\)|\*\*([A-Z])\*\*|\b(?:answer|option|choice)(?: is|:)? \(?([A-Z])\b", re.ASCII)
_WORD: Final = re.compile(r"[^\W_]+")
_TEXTS = (Kind.NUMBER, Kind.CHOICE, Kind.BOX, Kind.TEXT)
_SAME_BOX = 0.9
_END = 400
_MARKERS: Final = ("wait", "let me check", "let me re-check", "double-check", "on second thought", "hold on")
_WORDS_AFTER = 5
_WORST = 5


@reward(name="thought_boxes")
def boxes(response: Response, sample: Sample, *, most: Count = 20, largest: Share = 0.9) -> Term:
    """Valid / all x agreement, over the boxes [x1, y1, x2, y2] in the thought; 0 without any, or with more than `most`.

    A box is valid if it has an inside, lies in the picture, covers no more than `largest` of it and comes for the first
    time. Agreement is with the response's own answer: a number must equal the valid boxes' count; a box earns the best
    IoU with one of them, a list of boxes the mean of that; a point must lie in one; answers of other kinds agree.
    Source: the grounded-reasoning and counting rewards of GRIT (arXiv:2505.15879). Departures: syntax alone earns
    nothing there is to check; agreement is with the answer given, not the right one.

    Raises:
        Unscorable: the target is none of its kind, or its medium is missing.
    """
    gold(sample, sample.target.kind)
    resize = geometry.resize_map(response, sample)
    if response.answer.problems:
        return Term(0.0, response.answer.problems[0])
    found = [tuple(map(float, match.groups())) for match in _first(_BOX, response.answer.thought or "", most + 1)]
    if not found:
        return Term(0.0, "no box in the thought")
    if len(found) > most:
        return Term(0.0, f"more than {most} boxes in the thought")
    placed = [geometry.in_pixels(resize, box, response.frame) for box in found]
    valid = list(dict.fromkeys(box for box in placed if _is_inside(box, resize.original, largest)))
    agreement = _agreement(response, sample, valid) if valid else 0.0
    value = len(valid) / len(found) * agreement
    return Term(value, f"{len(valid)} of {len(found)} boxes valid, agreement with the answer {agreement:.2f}")


@reward(name="thought_consistency", kinds=_TEXTS)
def consistency(response: Response, sample: Sample) -> Term:
    """1 if the thought ends on the answer given, else 0.

    The last number, the last letter singled out as (B), **B** or "answer is B", or the last box (IoU >= 0.9) of the
    thought must be the answer; a text must occur in its last 400 characters, as words. Source: the consistency reward
    of R1-Reward (arXiv:2505.02835), which asks a judge. Departures: a rule; it multiplies the reward for the right
    answer there, as a gate does here.

    Raises:
        Unscorable: the target is none of these kinds, or none of its kind.
    """
    kind = sample.target.kind
    if kind not in _TEXTS:
        raise Unscorable(f"the target is a {kind}, this reward reads {', '.join(_TEXTS)}")
    gold(sample, kind)
    answer, thought = response.answer.value, response.answer.thought
    if response.answer.problems:
        return Term(0.0, response.answer.problems[0])
    if not thought:
        return Term(0.0, "no thought")
    concluded, agrees = _CONCLUSIONS[kind](thought[-_END:], answer)
    return Term(float(agrees), f"the thought ends on {concluded!r:.40}, the answer is {answer!r:.40}")


@reward(name="reflection", low=-10.0, attack_tolerance=10 / 11)  # a response without a thought earns 0
def reflection(
    response: Response,
    sample: Sample,
    *,
    most: Count = 2,
    markers: Annotated[tuple[str, ...], Field(min_length=1)] = _MARKERS,
) -> Term:
    """1 for one to `most` reflections in the thought, 0 for none, -2 n for n more than that, down to -10.

    A reflection is one of `markers`, in any case; at least one must be followed by five words or more before the next,
    and no two by the same, or it earns 0. Source: VL-Rethinker's code (arXiv:2504.08837), with weight 0.1 and gated by
    the reward for the right answer: +0.1 for one or two, else -0.2 each. Departures: more markers than "wait"; empty or
    repeated reflections earn nothing; more than five cost no more.

    Raises:
        Unscorable: the target is none of its kind.
    """
    gold(sample, sample.target.kind)
    if response.answer.problems:
        return Term(0.0, response.answer.problems[0])
    pattern = re.compile("|".join(rf"\b{re.escape(marker)}\b" for marker in markers), re.IGNORECASE)
    _, *after = pattern.split(response.answer.thought or "", maxsplit=_WORST + most)
    count = len(after)
    if count > most:
        return Term(-2.0 * min(count, _WORST), f"{count} reflections, at most {most} are worth something")
    said = [tuple(_WORD.findall(text.casefold())) for text in after]
    full = [words for words in said if len(words) >= _WORDS_AFTER]
    earns = bool(full) and len(set(said)) == len(said)
    return Term(float(earns), f"{count} reflections, {len(full)} with something to say")


def _first(pattern: re.Pattern[str], text: str, most: int) -> list[re.Match[str]]:
    """The first `most` matches."""
    return [match for match, _ in zip(pattern.finditer(text), range(most), strict=False)]


def _is_inside(box: Box, size: Size, largest: float) -> bool:
    x1, y1, x2, y2 = box
    within = 0.0 <= x1 < x2 <= size.width + 0.5 and 0.0 <= y1 < y2 <= size.height + 0.5
    return within and geometry.area(box) <= largest * size.width * size.height


def _agreement(response: Response, sample: Sample, valid: Sequence[Box]) -> float:
    """How far the answer is what the thought's boxes, in px_original, point at."""
    answer, resize = response.answer.value, geometry.resize_map(response, sample)

    def placed(values: Sequence[float]) -> Box:
        return geometry.in_pixels(resize, values, response.frame)

    match sample.target.kind:
        case Kind.NUMBER:
            return float(answer == len(valid))
        case Kind.BOX:
            return max(geometry.iou(placed(answer), box) for box in valid)
        case Kind.BOXES:
            best = [max(geometry.iou(placed(region.coordinates), box) for box in valid) for region in answer]
            return sum(best) / len(best) if best else 0.0
        case Kind.POINT:
            x, y = placed(answer)
            return float(any(x1 <= x <= x2 and y1 <= y <= y2 for x1, y1, x2, y2 in valid))
        case _:
            return 1.0


def _concluded_number(thought: str, answer: float) -> tuple[Any, bool]:
    found = _NUMBER.findall(thought)
    return (found[-1], float(found[-1]) == answer) if found else ("no number", False)


def _concluded_letter(thought: str, answer: str) -> tuple[Any, bool]:
    found = [match[1] or match[2] or match[3] for match in _LETTER.finditer(thought)]
    return (found[-1], found[-1] == answer) if found else ("no letter", False)


def _concluded_box(thought: str, answer: Box) -> tuple[Any, bool]:
    found = [tuple(map(float, match.groups())) for match in _BOX.finditer(thought)]
    if not found or not (found[-1][0] < found[-1][2] and found[-1][1] < found[-1][3]):
        return "no box", False
    return found[-1], geometry.iou(found[-1], answer) >= _SAME_BOX


def _concluded_text(thought: str, answer: str) -> tuple[Any, bool]:
    ending, words = (f" {' '.join(_WORD.findall(text.casefold()))} " for text in (thought, answer))
    return ending.strip()[-20:], bool(words.strip()) and words in ending


_CONCLUSIONS: Final = MappingProxyType[Kind, Callable[[str, Any], tuple[Any, bool]]](
    {
        Kind.NUMBER: _concluded_number,
        Kind.CHOICE: _concluded_letter,
        Kind.BOX: _concluded_box,
        Kind.TEXT: _concluded_text,
    }
)
