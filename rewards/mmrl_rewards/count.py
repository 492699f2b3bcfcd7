"""Rewards for counting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import reward, target_value

_NUMBER_WORDS: Final = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
_NUMBER_BY_WORD: Final[Mapping[str, int]] = MappingProxyType(
    {word: number for number, word in enumerate(_NUMBER_WORDS)}
)
_COUNT_PHRASE: Final = re.compile(r"([0-9]{1,9}|[a-z]+)((?: [a-z]+){0,3})\.?", re.ASCII)
_HEDGE_WORDS: Final = frozenset({*_NUMBER_WORDS, "or", "and", "to"})
_MAX_CHARS: Final = 80


@reward(name="count", answer_types=(AnswerType.NUMBER,))
def exact(response: Response, sample: Sample, *, words: bool = False) -> RewardValue:
    """1 if the answer is the target's number of things, else 0; with `words`, "three" and "3 apples" are 3, too.

    Source: the counting reward of R1-V (github.com/Deep-Agent/R1-V). Departures: the answer alone is read, never the
    thinking, and it holds one number. Number words go to twenty.

    Raises:
        Unscorable: the target is not a whole number from 0 on.
    """
    target = _target_count(sample)
    value = response.answer.value
    if value is None and words:
        value = _parse_count_phrase(response.answer.text or "")
    if value is None:
        return RewardValue(0.0, response.answer.problems[0])
    return RewardValue(float(value == target), f"{value}, expected {target}")


@reward(name="count_graded", answer_types=(AnswerType.NUMBER,))
def graded(response: Response, sample: Sample) -> RewardValue:
    """max(0, 1 - |answer - target| / max(1, target)).

    It has no peak: use it beside `count:exact`, since always naming a middling number earns something. Source: this
    library's; one minus the relative counting error. Departures: a target of 0 counts as 1.

    Raises:
        Unscorable: the target is not a whole number from 0 on.
    """
    target = _target_count(sample)
    value = response.answer.value
    if value is None:
        return RewardValue(0.0, response.answer.problems[0])
    return RewardValue(max(0.0, 1.0 - abs(value - target) / max(1, target)), f"{value}, expected {target}")


def _target_count(sample: Sample) -> int:
    target = target_value(sample, AnswerType.NUMBER)
    if target < 0 or target != int(target):
        raise Unscorable(f"the target {target!r:.40} is not a number of things")
    return int(target)


def _parse_count_phrase(text: str) -> int | None:
    """Return the number in "three" or "3 apples", None if there is none or more than one."""
    counted = _COUNT_PHRASE.fullmatch(text.strip().lower()) if len(text) <= _MAX_CHARS else None
    if not counted or _HEDGE_WORDS & set(counted[2].split()):
        return None
    return int(counted[1]) if counted[1].isdigit() else _NUMBER_BY_WORD.get(counted[1])
