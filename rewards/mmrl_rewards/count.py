"""Rewards for counting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import BadAnswer, answer_value, reward, target_value

_NUMBER_WORDS: Final = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
_NUMBER_BY_WORD: Final[Mapping[str, int]] = MappingProxyType(
    {word: number for number, word in enumerate(_NUMBER_WORDS)}
)
# A number or a word, then up to three words for the things counted, such as "3 red apples".
_COUNT_PHRASE: Final = re.compile(r"([0-9]{1,9}|[a-z]+)((?: [a-z]+){0,3})\.?", re.ASCII)
# A phrase with one of these after its number states more than one, such as "3 or four".
_HEDGE_WORDS: Final = frozenset({*_NUMBER_WORDS, "or", "and", "to"})
_MAX_CHARS: Final = 80  # a longer answer is not a count phrase


@reward(name="count", answer_types=(AnswerType.NUMBER,))
def exact(response: Response, sample: Sample, *, words: bool = False) -> RewardValue:
    """Return 1 if the answer is the target's count, else 0. With `words`, "three" and "3 apples" count as 3.

    Source: the counting reward of R1-V (github.com/Deep-Agent/R1-V).
    Departures: only the answer is read, never the thinking, and it must hold exactly one number. Number words go up to
    twenty.
    Unscorable: the target is not a whole number of 0 or more.
    """
    target = _target_count(sample)
    value = response.answer.value
    if value is None and words:
        value = _parse_count_phrase(response.answer.text or "")
    if value is None:
        raise BadAnswer(response.answer.problems[0])
    return RewardValue(float(value == target), f"{value}, expected {target}")


@reward(name="count_graded", answer_types=(AnswerType.NUMBER,))
def graded(response: Response, sample: Sample) -> RewardValue:
    """Return max(0, 1 - |answer - target| / max(1, target)).

    Add it to `count:exact` instead of using it alone, because always answering a medium number earns something.

    Source: this library's own, one minus the relative counting error.
    Departures: a target of 0 is divided by as if it were 1.
    Unscorable: the target is not a whole number of 0 or more.
    """
    target = _target_count(sample)
    value = answer_value(response)
    return RewardValue(max(0.0, 1.0 - abs(value - target) / max(1, target)), f"{value}, expected {target}")


def _target_count(sample: Sample) -> int:
    """Return the target's count, a whole number of 0 or more."""
    target = target_value(sample, AnswerType.NUMBER)
    if target < 0 or target != int(target):
        raise Unscorable(f"the target {target!r:.40} is not a number of things")
    return int(target)


def _parse_count_phrase(text: str) -> int | None:
    """Return the number in "three" or "3 apples", or None if there is no number or more than one."""
    phrase = _COUNT_PHRASE.fullmatch(text.strip().lower()) if len(text) <= _MAX_CHARS else None
    if not phrase or _HEDGE_WORDS & set(phrase[2].split()):
        return None
    return int(phrase[1]) if phrase[1].isdigit() else _NUMBER_BY_WORD.get(phrase[1])
