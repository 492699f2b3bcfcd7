"""Rewards for counting."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.chinese import to_english
from mmrl_rewards.choice_grammar import strip_markup
from mmrl_rewards.contract import BadAnswer, Of, part_text, part_value, reward, target_value
from mmrl_rewards.number_words import ONES, TENS, split_number

# The grammar of a count in words, in any case and after markup is removed:
#
#   answer = [lead] number [things] ["."] | [lead] none
#   lead   = "there are" | "I see" | ["the"] ("answer" | "number of" words | ..) ("is" | ":") | "exactly" | ..
#   number = digits | number words, such as "one hundred and five" | ("a" | "half a" | number) ("dozen" | ..)
#          | "a pair" | "a couple" | "a single" | number "(" the same number ")"
#   things = up to eight words without a further number or a word of doubt; they begin with no unit of measure
#   none   = "none" | "none of them" | "nobody" | "not a single one" | "no" things | "there are not any" things
#
# So these are not counts: "3 or 4", "3-4", "about 5", "at least 5", "not 5", "5%", "3 cm", "3.5", "three and a half",
# "several", "dozens", "3 cats and a dog", "2 pairs of shoes", "3rd".
# In Chinese, a thing follows its measure word, as in 3 只猫; 三角形 counts nothing.
_THING: Final = re.compile(
    r"[a-z][a-z'-]*|[个只条张本辆匹头颗朵位名件块座棵片支把根架艘台口种人层间枚幅盏][\u4e00-\u9fff]*", re.ASCII
)
_LEAD: Final = re.compile(
    r"(?:(?:there(?:'s| is| are)|(?:i|we) (?:can )?(?:see|count|counted|find)|it is|it's|exactly|only|just|all"
    r"|a total of|(?:the |my )?(?:(?:final|correct|total) )?"
    r"(?:answer|count|total|number)(?: of (?:[a-z]+ ){1,6}?| )?(?:is|are|=)"
    r"|(?:answer|count|total|number):) ?)*",
    re.ASCII,
)
_REPEATED: Final = re.compile(r"(.+?) \(([^()]+)\)(.*)")
_NOT_ANY: Final = re.compile(r"^(?:there (?:are|is)(?:n't| not)|(?:i|we) (?:don't|do not) see) any\b")
_NONE_OF: Final = re.compile(
    r"none(?: at all| of (?:them|these|those|the [a-z]+))?|nobody|nothing|no one"
    r"|not (?:even )?(?:a single|one)(?: [a-z]+)?"
)
_NOT_COUNTED: Final = frozenset({"idea", "clue", "answer", "way", "doubt", "wonder", "comment", "problem"})
_DOUBT_WORDS: Final = frozenset(
    {
        *ONES,
        *TENS,
        *("dozen", "dozens", "pair", "couple", "single", "hundred", "thousand", "million"),
        *("score", "hundreds", "thousands"),
        *("or", "to", "than", "percent", "half", "maybe", "perhaps", "probably", "about", "around", "approximately"),
        *("roughly", "least", "most", "more", "less", "fewer", "not", "point", "minus", "out", "per", "possibly", "if"),
    }
)
_COLLECTIVES: Final = frozenset({"pairs", "couples", "sets", "groups", "trios"})
_MEASURES: Final = frozenset(
    {*("mm", "cm", "m", "km", "inch", "inches", "feet", "foot", "g", "kg", "lb", "lbs"), *("ml", "l", "degrees")}
)
_MAX_CHARS, _MAX_THINGS = 120, 8  # characters of a phrase; words after its number


@reward(name="count", answer_types=(AnswerType.NUMBER,))
def exact(response: Response, sample: Sample, *, words: bool = False, of: Of = "answer") -> RewardValue:
    """Return 1 if the answer is the target's count, else 0. With `words`, "three" and "3 apples" count as 3.

    "A dozen" is 12, 三个 3, "1.2 thousand" 1,200, and "no apples" 0. A range, an approximation, a negation, a fraction
    and a percentage are not counts.

    Source: the counting reward of R1-V (github.com/Deep-Agent/R1-V).
    Departures: only the answer is read, never the thinking unless `of` says so, and it must hold one number only,
    which may come in words and again in digits.
    Unscorable: the target is not a whole number of 0 or more.
    """
    target = _target_count(sample)
    value = _read_count(response, words=words, of=of)
    return RewardValue(float(value == target), f"{value}, expected {target}")


@reward(name="count_graded", answer_types=(AnswerType.NUMBER,))
def graded(response: Response, sample: Sample, *, words: bool = False, of: Of = "answer") -> RewardValue:
    """Return max(0, 1 - |answer - target| / max(1, target)). With `words`, counts are read as in `exact`.

    Add it to `count:exact` instead of using it alone, because always answering a medium number earns something.

    Source: this library's own, one minus the relative counting error.
    Departures: a target of 0 is divided by as if it were 1.
    Unscorable: the target is not a whole number of 0 or more.
    """
    target = _target_count(sample)
    value = _read_count(response, words=words, of=of)
    return RewardValue(max(0.0, 1.0 - abs(value - target) / max(1, target)), f"{value}, expected {target}")


def _target_count(sample: Sample) -> int:
    """Return the target's count, a whole number of 0 or more."""
    target = target_value(sample, AnswerType.NUMBER)
    if target < 0 or target != int(target):
        raise Unscorable(f"the target {target!r:.40} is not a number of things")
    return int(target)


def _read_count(response: Response, *, words: bool, of: Of) -> float:
    """Return the number of a part of the response, with `words` one that is written as a phrase, too.

    Raises:
        BadAnswer: it holds no number, or more than one.
    """
    try:
        number: float = part_value(response, AnswerType.NUMBER, of)
    except BadAnswer:
        phrase = part_text(response, of) if words else ""
        count = _parse_count_phrase(phrase) if len(phrase) <= _MAX_CHARS else None
        if count is None:
            raise
        return count
    return number


@lru_cache(maxsize=4096)  # siblings often give the same answer
def _parse_count_phrase(text: str) -> int | None:
    """Return the count in "three" or "3 apples", or None if the text is not in the grammar above."""
    phrase = to_english(strip_markup(text)).lower().strip("\"' ").rstrip(".!")
    phrase = _NOT_ANY.sub("no", phrase, count=1)
    lead = _LEAD.match(phrase)
    phrase = phrase[lead.end() :].strip() if lead else phrase
    repeated = _REPEATED.fullmatch(phrase)
    if repeated and _parse_count_phrase(repeated[1]) == _parse_count_phrase(repeated[2]):
        phrase = repeated[1] + repeated[3]
    if _NONE_OF.fullmatch(phrase):
        return 0
    words = phrase.split()
    if words[:1] == ["no"]:
        return 0 if len(words) > 1 and words[1] not in _NOT_COUNTED and _are_things(words[1:]) else None
    found = split_number(phrase)
    return found[0] if found and isinstance(found[0], int) and _are_things(found[1]) else None


def _are_things(words: Sequence[str]) -> bool:
    """Return True if words may follow a count: they name things, and neither another number nor a doubt."""
    if len(words) > _MAX_THINGS or not all(map(_THING.fullmatch, words)) or _DOUBT_WORDS & set(words):
        return False
    if words and (words[0] in _MEASURES or words[-1] == "and"):
        return False
    # "Three cats and a dog" are four.
    for first, second in pairwise(words):
        if first in _COLLECTIVES and second == "of":
            return False
        if first == "and" and second in ("a", "an", "another", "some", "no"):
            return False
    return True
