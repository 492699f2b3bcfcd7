"""Which number, list or text a response gives where there are no options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

from mmrl.benchmarks.extraction import phrases
from mmrl.benchmarks.extraction.numbers import Number, find_number_words, find_numbers
from mmrl.benchmarks.extraction.text import (
    CharSpan,
    content_words,
    iter_sentences_backwards,
    last_answer_tag_span,
    last_boxed_span,
    sentence_end,
    sentence_start,
)

_EQUALS_SIGN: Final = re.compile(r"[=≈]|\b(?:is|are|equals)(?=\s)")
_VALUE_ANCHOR: Final = re.compile(
    r"[=≈:是为有剩]"
    r"|\b(?:is|are|was|were|be|equals?|equal to|approximately|about|left|remain|gives?|get|have|has)(?=\s)",
    re.IGNORECASE,
)
_SUBCLAUSE: Final = re.compile(
    r",? (?:which|where|since|because|based on|after|compared|while|whereas|as)\b|[(]", re.IGNORECASE
)
_RANGE_TO: Final = re.compile(r"[^\d\n.,]{0,12}\b(?:to)\b[ $€£]*")
_OR_BETWEEN: Final = re.compile(r"[^\d\n.,]{0,12}(?:\bor\b|[ ]/[ ])[ $€£\\a-z{}]{0,12}")
_BETWEEN_WORD: Final = re.compile(r"\bbetween[^\d\n]{0,12}$", re.IGNORECASE)
_NUMBER_ROW: Final = re.compile(r"[^\w\n-]*-?[\d.]{1,12}(?:[ ]?,[ ]{0,2}(?:and[ ])?-?[\d.]{1,12})+[^\w\n]*\Z")
"""Numbers in a row and nothing else."""
_NEGATED_BEFORE: Final = re.compile(r"(?:\bnot|n't) $", re.IGNORECASE)
_AFTER_LEADING_NUMBER: Final = re.compile(
    r"[ \t]*(?:[A-Za-z%°²³$]+[ \t]*){0,2}[.!]?(?:[ \t]*\n|[ ]+(?:This|That|Because|Since|Explanation)\b)"
)
"""What comes after a number that is given first, to be explained."""
_NUMBER_START_CHARS: Final = "+-.\\S\u20ac\u00a3\u00a5"
"""What a number begins with, but for digits: signs, fractions, currencies."""
_BRACKETED_LIST: Final = re.compile(r"\[[^\[\]]{1,500}\]")
_BOLD_TEXT: Final = re.compile(r"\*\*[^*\n]{1,80}\*\*")
_CLOSING_REMARK: Final = re.compile(r"\s*(?:I hope|let me know|please let|note that|if you)\b", re.IGNORECASE)


class OpenAnswer(NamedTuple):
    """A value as the response writes it, and where."""

    value: str
    rule: str
    start: int
    end: int
    number: float | None = None


def number_in_span(text: str, span: CharSpan, rule: str) -> OpenAnswer | None:
    """The number that the content of a box or of answer tags is."""
    inner = text[slice(*span)]
    found = None if phrases.REFUSAL.search(inner) else _stated_number(inner, CharSpan(0, len(inner)), frozenset())
    return _to_open_answer(
        text, found and found._replace(start=span.start + found.start, end=span.start + found.end), rule
    )


@lru_cache(maxsize=4096)  # many responses answer one question
def numbers_in_question(question: str) -> frozenset[float]:
    """The numbers that a question tells."""
    return frozenset(number.value for number in (*find_numbers(question), *find_number_words(question)))


def announced_number(text: str) -> OpenAnswer | None:
    """The number that the last announcement of an answer names."""
    for at in phrases.find_answer_phrases(text):
        part = CharSpan(at, sentence_end(text, at))
        found = None if phrases.REFUSAL.search(text, *part) else _stated_number(text, part, frozenset())
        if found is not None:
            return _to_open_answer(text, found, "announced_number")
    return None


def lone_number(text: str, question_numbers: frozenset[float]) -> OpenAnswer | None:
    """The one number of a text that says little else."""
    if len(text) > 60 or phrases.REFUSAL.search(text):
        return None
    found = [one for one in (*find_numbers(text), *find_number_words(text)) if not _is_negated(text, one)]
    found = [one for one in found if one.value not in question_numbers] or found
    return _to_open_answer(text, found[0], "lone_number") if len(found) == 1 else None


def leading_number(text: str) -> OpenAnswer | None:
    """The number that a text begins with, alone in its line or to be explained, where nothing after it concludes."""
    lead = text.lstrip(" \t\n$")[:1]
    found = next(find_numbers(text), None) if lead.isdigit() or lead in _NUMBER_START_CHARS else None
    if found is None or text[: found.start].strip(" \t\n$") or not _AFTER_LEADING_NUMBER.match(text, found.end):
        return None
    rest = (part for part in iter_sentences_backwards(text) if part.start >= found.end)
    return (
        None
        if any(phrases.CONCLUSION_START.match(text, *part) for part in rest)
        else _to_open_answer(text, found, "first_number")
    )


def is_ambiguous(text: str) -> bool:
    """Whether a box, answer tags or else the last announcement names several numbers, and so none."""
    at = next(phrases.find_answer_phrases(text), None)
    announced = None if at is None else CharSpan(at, sentence_end(text, at))
    part = last_boxed_span(text) or last_answer_tag_span(text) or announced
    inner = text[slice(*part)] if part else ""
    return _names_several(inner, CharSpan(0, len(inner)), [*find_numbers(inner)])


def bold_number(text: str, text_with_emphasis: str, question_numbers: frozenset[float]) -> OpenAnswer | None:
    """The number in bold in the last sentence that concludes, else the first in bold; `marked` has the marks."""
    bold = [CharSpan(*match.span()) for match in _BOLD_TEXT.finditer(text_with_emphasis)]
    stated = [
        found
        for span in bold
        if (found := _stated_number(text, span, question_numbers)) and found.value not in question_numbers
    ]
    concluding = [
        found for found in stated if phrases.is_conclusion(text, sentence_start(text, found.start), found.start)
    ]
    best = concluding[-1] if concluding else next(iter(stated), None)
    return _to_open_answer(text, best, "bold_number")


def concluding_number(text: str, question: str, question_numbers: frozenset[float]) -> OpenAnswer | None:
    """The number of the last sentence that concludes; else of the one most like the question; else of the last."""
    parts = [part for part in iter_sentences_backwards(text) if not _CLOSING_REMARK.match(text, part.start)][:60]
    stated = [
        (part, found) for part in parts if (found := _stated_number(text, part, question_numbers, prefer_last=True))
    ]
    if not stated:
        return None
    wanted, result = content_words(question), _last_equation_value(text)

    def standing(entry: tuple[CharSpan, Number]) -> float:
        part, found = entry
        if phrases.is_conclusion(text, *part) or (entry is stated[0] and found.value == result):
            return 2.0
        if found.value in question_numbers or phrases.PLAN_START.match(text, part.start) or not wanted:
            return 0.0
        share = len(wanted & content_words(text[slice(*part)])) / len(wanted)
        return share if share >= 0.4 else 0.0

    return _to_open_answer(text, max(stated, key=standing)[1], "concluding_number")


def _last_equation_value(text: str) -> float | None:
    """What the last equation of a text comes to."""
    equals = text.rfind("=")
    return next((one.value for one in find_numbers(text, equals, equals + 40)), None) if equals >= 0 else None


def last_list(text: str) -> OpenAnswer | None:
    """The last list in brackets."""
    found = [*_BRACKETED_LIST.finditer(text)]
    return OpenAnswer(found[-1][0], "last_list", found[-1].start(), found[-1].end()) if found else None


def _stated_number(
    text: str, part: CharSpan, question_numbers: frozenset[float], *, prefer_last: bool = False
) -> Number | None:
    """The number that a part of a text states: after its last =, after its last verb, or first; not one asked about."""
    digits = [one for one in find_numbers(text, *part) if not _is_negated(text, one)]
    found = [one for one in digits if one.value not in question_numbers]
    found = (
        found
        or [one for one in find_number_words(text, *part) if one.value not in question_numbers or not digits]
        or digits
    )
    if len(found) <= 1:
        return found[0] if found else None
    if _names_several(text, part, found, single_expected=not prefer_last):
        return None
    clause = _SUBCLAUSE.search(text, found[0].end, part.end)
    found = [one for one in found if clause is None or one.start < clause.start()]
    if ranges := [there for here, there in pairwise(found) if _RANGE_TO.fullmatch(text, here.end, there.start)]:
        return ranges[-1]
    anchors = _VALUE_ANCHOR if prefer_last else _EQUALS_SIGN
    for match in reversed([*anchors.finditer(text, part.start, found[-1].start)]):
        return next(one for one in found if one.start >= match.start())
    return found[-1 if prefer_last else 0]


def _names_several(text: str, part: CharSpan, found: Sequence[Number], *, single_expected: bool = True) -> bool:
    """Whether a part of a text leaves open which of several numbers it is.

    Where it states one `plainly`, a row of them and two that it lies between do so as well.
    """
    pairs = [(here, there) for here, there in pairwise(found) if there.value not in (here.value, 100 * here.value)]
    if any(_OR_BETWEEN.fullmatch(text, here.end, there.start) for here, there in pairs):
        return True
    if not single_expected or not pairs:
        return False
    return _NUMBER_ROW.match(text, part.start, part.end) is not None or any(
        _BETWEEN_WORD.search(text, part.start, here.start) and text[here.end : there.start].strip() == "and"
        for here, there in pairs
    )


def _is_negated(text: str, number: Number) -> bool:
    """Whether a number is said not to be it."""
    return _NEGATED_BEFORE.search(text, max(0, number.start - 5), number.start) is not None


def _to_open_answer(text: str, number: Number | None, rule: str) -> OpenAnswer | None:
    if number is None:
        return None
    start, end = number.start, number.end
    start += text[start] == "$" == text[end : end + 1]  # what LaTeX sets apart is no price
    return OpenAnswer(text[start:end].strip(), rule, start, end, number.value)
