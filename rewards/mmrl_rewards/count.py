"""Rewards for counting."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from mmrl.answer.language import CONCLUSIONS
from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.chinese import MEASURES, names_thing, to_english
from mmrl_rewards.choice_grammar import strip_markup
from mmrl_rewards.contract import BadAnswer, Of, part_text, part_value, question_text, reward, target_value
from mmrl_rewards.number_words import ONES, SCALES, TENS, split_number
from mmrl_rewards.vocabulary import is_doubtful

# The grammar of a count in words, in any case and after markup is removed:
#
#   answer = [lead] number [things] ["."] | [lead] none
#   lead   = "there are" | "I see" | ["the"] ("answer" | "number of" words | ..) ("is" | ":") | "exactly" | ..
#   number = digits | number words, such as "one hundred and five" | ("a" | "half a" | number) ("dozen" | ..)
#          | "a pair" | "a couple" | "a single" | number "(" the same number ")"
#   things = up to eight words, none a number or of doubt: [words thing] ["are"] ["visible" | ..] [("in" | ..) words]
#   thing  = a word in the plural or of the question, and after "one" any word; a unit must be of the question
#   none   = "none" | "none of them" | "nobody" | "not a single one" | "no" things | "there are not any" things
#
# So these are not counts: "3 or 4", "3-4", "about 5", "at least 5", "not 5", "5%", "3 cm", "3.5", "three and a half",
# "several", "dozens", "3 cats and a dog", "2 pairs of shoes", "3rd", "3 is wrong", "3 max", "no shortage of cars".
# In Chinese, a thing follows its measure word, as in 3 只猫; 三角形 counts nothing.
_LEAD: Final = re.compile(
    r"(?:(?:there(?:'s| is| are)|(?:i|we|you) (?:can )?(?:see|count(?:ed)?|find)|it is|it's|exactly|only|just|all"
    rf"|(?:{CONCLUSIONS}),?|a total of|(?:(?:based on|according to|looking at|from|in) )?"
    r"(?:the|this) (?:image|picture|photo|scene),?(?: (?:shows|contains|depicts|has))?"
    r"|(?:the |my )?(?:(?:final|correct|total) )?(?:answer|count|total|number)(?: of(?: [a-z]+){1,6}?)? ?(?:is|are|=|:)"
    r") ?)*",
    re.ASCII,
)
_REPEATED: Final = re.compile(r"(.+?) \(([^()]+)\)(.*)")
_NOT_ANY: Final = re.compile(r"^(?:there (?:are|is)(?:n't| not)|(?:i|we) (?:don't|do not) see) any\b")
_NONE_OF: Final = re.compile(
    r"none(?: at all| of th(?:em|ese|ose|e [a-z]+))?|nobody|nothing|no one|not (?:even )?(?:a single|one)( [a-z]+)?"
)
# Words that are never of things, and "3 cats and a dog", which are 4.
_NO_THINGS: Final = re.compile(
    rf" (?:{'|'.join((*ONES, *TENS))}|(?:{'|'.join(SCALES)}|lakh|crore|third|quarter|time)s?|score|half|halves"
    r"|[a-z]*(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths?|or|to|than|percent|likely|possible|about|least|most"
    r"|more|less|fewer|plus|out|per|if|odd|something|some|many|several|others?|another|too|tops|counting|upwards|pair"
    r"|attached|provided|available|not|[a-z]*n't|can|cannot|could|would|should|may|might|must|never|nope|seems|missing"
    r"|exclud[a-z]+|couple|single|number|count|(?:idea|clue|answer|way|doubt|wonder|comment|problem|result|limit|thank"
    r"|moment|guess|thought)(?:s|es)?|(?:pairs|couples|sets|groups|trios) of|and(?= $)|and (?:an?|no|then))(?= )"
)
_MEASURE: Final = re.compile(
    r"[mck]?m|[mc]?l|k?g|(?:inche|yard|mile|pound|ounce|degree|minute|hour|day|week|month|year|decade|dollar|euro|cent"
    r"|volt|watt|amp|byte|kg|km|cm|lb|(?:kilo|milli|centi|micro|nano)?(?:met(?:er|re)|lit(?:er|re)|gram|second))s?"
    r"|inch|feet|foot"
)
_STATE: Final = "visible|present|shown|seen|there|here|total|altogether"
_BE: Final = " (?:is|are|was|were)"
_IN: Final = " (?:of|in|on|at|with|by|from|near|under|behind|beside|between|inside|that|which|who)"
_WORD: Final = rf"(?!(?:{_BE}|{_IN}) ) [a-z'-]+"
_PLURAL: Final = (
    " (?:(?!(?:was|has|this|its|always) )[a-z-]{2,}(?<![su])s"
    "|[a-z-]*(?:people|men|children|fish|sheep|deer|mice|geese|teeth|dice)"
    rf"|[{MEASURES}][\u4e00-\u9fff]*)"
)
_THINGS: Final = re.compile(
    rf"(?:(?:{_WORD})*{_PLURAL}(?:{_BE})?(?: [a-z]+(?:ed|ing))*|(?:{_WORD})*(?! (?:{_STATE}) )(?P<single>{_WORD}))?"
    rf"(?:{_BE})?(?: (?:{_STATE}))*(?:{_IN}(?: [a-z'-]+)+)? "
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
    value = _read_count(response, sample, words=words, of=of)
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
    value = _read_count(response, sample, words=words, of=of)
    return RewardValue(max(0.0, 1.0 - abs(value - target) / max(1, target)), f"{value}, expected {target}")


def _target_count(sample: Sample) -> int:
    """Return the target's count, a whole number of 0 or more."""
    target = target_value(sample, AnswerType.NUMBER)
    if target < 0 or target != int(target):
        raise Unscorable(f"the target {target!r:.40} is not a number of things")
    return int(target)


def _read_count(response: Response, sample: Sample, *, words: bool, of: Of) -> float:
    """Return the number of a part of the response, with `words` one that is written as a phrase, too.

    Raises:
        BadAnswer: it holds no number, or more than one.
    """
    try:
        number: float = part_value(response, AnswerType.NUMBER, of)
    except BadAnswer:
        phrase = part_text(response, of) if words else ""
        count = _parse_count_phrase(phrase, question_text(sample)) if len(phrase) <= _MAX_CHARS else None
        if count is None:
            raise
        return count
    return number


@lru_cache(maxsize=4096)  # siblings often give the same answer
def _parse_count_phrase(text: str, question: str) -> int | None:
    """Return the count in "three" or "3 apples", or None if the text is not in the grammar above."""
    phrase = to_english(strip_markup(text)).lower().strip("\"' ").rstrip(".!")
    if is_doubtful(phrase):
        return None
    phrase = _NOT_ANY.sub("no", phrase, count=1)
    lead = _LEAD.match(phrase)
    phrase = phrase[lead.end() :].strip() if lead else phrase
    repeated = _REPEATED.fullmatch(phrase)
    if repeated and _parse_count_phrase(repeated[1], "") == _parse_count_phrase(repeated[2], ""):
        phrase = repeated[1] + repeated[3]
    if _NONE_OF.fullmatch(phrase):
        return 0
    words = phrase.split()
    if words[:1] == ["no"] and "没" in text:  # 没有狗, and 没有 alone
        return 0 if len(words) == 1 or names_thing("".join(words[1:]), question) else None
    found = (0, words[1:]) if words[:1] == ["no"] and len(words) > 1 else split_number(phrase)
    if not found or not isinstance(found[0], int) or not _are_things(found[1], found[0], question):
        return None
    return found[0]


def _are_things(words: Sequence[str], count: int, question: str) -> bool:
    """Return True if words may follow a count: they name things, and neither another number nor a doubt."""
    text = " ".join(["", *words, ""])
    things = None if len(words) > _MAX_THINGS or _NO_THINGS.search(text) else _THINGS.fullmatch(text)
    if not things:
        return False
    unit = words[0] if words and _MEASURE.fullmatch(words[0]) else ""
    thing = unit or (things["single"] if count != 1 else "")
    return not thing or is_named(thing.strip(), question)


def is_named(thing: str, question: str) -> bool:
    """Return True if a question has this word, in the singular or plural, and it does not mean its image."""
    stem = thing.removesuffix("s")
    return stem not in {"image", "picture", "photo", "question"} and bool(
        re.search(rf"\b{re.escape(stem)}", question, re.IGNORECASE)
    )
