"""Rules that find the number or list that a response gives to a question without options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final

from mmrl.answer.language import REASONS
from mmrl.benchmarks.extraction import phrases
from mmrl.benchmarks.extraction.numbers import Number, find_number_words, find_numbers
from mmrl.benchmarks.extraction.text import (
    CharSpan,
    Extraction,
    content_words,
    iter_sentences_backwards,
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
    rf",? (?:which|where|{REASONS}|based on|after|compared|while|whereas)\b|[(]", re.IGNORECASE
)
_RANGE_TO: Final = re.compile(r"[^\d\n.,]{0,12}\b(?:to)\b[ $€£]*")
_OR_BETWEEN: Final = re.compile(r"[^\d\n.,]{0,12}(?:\bor\b|[ ]/[ ])[ $€£\\a-z{}]{0,12}")
_BETWEEN_WORD: Final = re.compile(r"\bbetween[^\d\n]{0,12}$", re.IGNORECASE)
# Numbers in a row and nothing else, such as "3, 5 and 7".
_NUMBER_ROW: Final = re.compile(r"[^\w\n-]*-?[\d.]{1,12}(?:[ ]?,[ ]{0,2}(?:and[ ])?-?[\d.]{1,12})+[^\w\n]*\Z")
_NEGATED_BEFORE: Final = re.compile(r"(?:\bnot|n't) $", re.IGNORECASE)
# Text after a number that is given first and then explained: a unit, and the end of the line or "Because".
_AFTER_LEADING_NUMBER: Final = re.compile(
    r"[ \t]*(?:[A-Za-z%°²³$]++[ \t]*){0,2}[.!]?(?:[ \t]*\n|[ ]+(?:This|That|Because|Since|Explanation)\b)"
)
# Characters besides digits that a number may begin with: signs, fractions, currencies.
_NUMBER_START_CHARS: Final = "+-.\\S\u20ac\u00a3\u00a5"
_BOLD_TEXT: Final = re.compile(r"\*\*[^*\n]{1,80}\*\*")
_CLOSING_REMARK: Final = re.compile(r"\s*(?:I hope|let me know|please let|note that|if you)\b", re.IGNORECASE)
_MAX_LONE_CHARS: Final = 60  # characters of a text whose only number is its answer
_MAX_SENTENCES: Final = 60  # sentences at the end of a response in which a conclusion is looked for
_MIN_SHARED_WORDS: Final = 0.4  # share of the question's words that a sentence must have to answer it
_EQUATION_WINDOW: Final = 40  # characters after the last = in which its result is looked for


def number_in_span(text: str, span: CharSpan, rule: str) -> Extraction | None:
    """Return the number that the content of a box or of answer tags states."""
    inner = text[slice(*span)]
    # "Cannot be found from 3 and 4" states neither.
    if phrases.REFUSAL.search(inner):
        return None
    number = _stated_number(inner, CharSpan(0, len(inner)), frozenset())
    if number is None:
        return None
    number = number._replace(start=number.start + span.start, end=number.end + span.start)
    return _to_extraction(text, number, rule)


@lru_cache(maxsize=4096)  # many responses answer one question
def numbers_in_question(question: str) -> frozenset[float]:
    """Return the numbers that a question gives, in digits or words."""
    return frozenset(number.value for number in (*find_numbers(question), *find_number_words(question)))


def announced_number(text: str) -> Extraction | None:
    """Return the number after the last phrase that announces an answer."""
    for position in phrases.find_answer_phrases(text):
        span = CharSpan(position, sentence_end(text, position))
        if phrases.REFUSAL.search(text, *span):
            continue
        number = _stated_number(text, span, frozenset())
        if number is not None:
            return _to_extraction(text, number, "announced_number")
    return None


def lone_number(text: str, question: str) -> Extraction | None:
    """Return the one number of a text that says little else."""
    if len(text) > _MAX_LONE_CHARS or phrases.REFUSAL.search(text):
        return None
    numbers = [number for number in (*find_numbers(text), *find_number_words(text)) if not _is_negated(text, number)]
    # A number that the question gives counts only if there is no other.
    numbers = [number for number in numbers if number.value not in numbers_in_question(question)] or numbers
    return _to_extraction(text, numbers[0], "lone_number") if len(numbers) == 1 else None


def leading_number(text: str) -> Extraction | None:
    """Return the number that a text begins with, by itself in its line or explained after it."""
    first_char = text.lstrip(" \t\n$")[:1]
    if not (first_char.isdigit() or first_char in _NUMBER_START_CHARS):
        return None
    number = next(find_numbers(text), None)
    if number is None or text[: number.start].strip(" \t\n$") or not _AFTER_LEADING_NUMBER.match(text, number.end):
        return None
    # A later sentence may conclude something else.
    for sentence in iter_sentences_backwards(text):
        if sentence.start >= number.end and phrases.CONCLUSION_START.match(text, *sentence):
            return None
    return _to_extraction(text, number, "first_number")


def is_ambiguous(text: str) -> bool:
    """Return True when a box, answer tags or the last announcement leaves open which of several numbers it means."""
    span = phrases.find_explicit_span(text)
    inner = text[slice(*span)] if span else ""
    return _leaves_open(inner, CharSpan(0, len(inner)), list(find_numbers(inner)))


def bold_number(text: str, text_with_emphasis: str, question: str) -> Extraction | None:
    """Return the number in bold in the last sentence that concludes, else the first number in bold.

    `text` is the response with its emphasis blanked out, `text_with_emphasis` the same with its asterisks.
    """
    question_numbers, stated = numbers_in_question(question), []
    for match in _BOLD_TEXT.finditer(text_with_emphasis):
        number = _stated_number(text, CharSpan(*match.span()), question_numbers)
        if number is not None and number.value not in question_numbers:
            stated.append(number)
    for number in reversed(stated):
        if phrases.is_conclusion(text, sentence_start(text, number.start), number.start):
            return _to_extraction(text, number, "bold_number")
    return _to_extraction(text, stated[0], "bold_number") if stated else None


def concluding_number(text: str, question: str) -> Extraction | None:
    """Return the number of the last sentence that concludes, else of the one most like the question, else the last."""
    # "I hope this helps" concludes nothing.
    sentences = [
        sentence for sentence in iter_sentences_backwards(text) if not _CLOSING_REMARK.match(text, sentence.start)
    ]
    question_numbers, stated = numbers_in_question(question), []
    for sentence in sentences[:_MAX_SENTENCES]:
        number = _stated_number(text, sentence, question_numbers, prefer_last=True)
        if number is not None:
            stated.append((sentence, number))
    if not stated:
        return None
    number = _number_of_conclusion(text, stated) or _number_like_question(text, stated, question) or stated[0][1]
    return _to_extraction(text, number, "concluding_number")


def _number_of_conclusion(text: str, stated: Sequence[tuple[CharSpan, Number]]) -> Number | None:
    """Return the number of the last sentence that concludes; the result of the last equation is a conclusion, too.

    `stated` has the sentences, the last one first, each with its number.
    """
    equals = text.rfind("=")
    result = next(find_numbers(text, equals, equals + _EQUATION_WINDOW), None) if equals >= 0 else None
    last_number = stated[0][1]
    if result is not None and last_number.value == result.value:
        return last_number
    for sentence, number in stated:
        if phrases.is_conclusion(text, *sentence):
            return number
    return None


def _number_like_question(text: str, stated: Sequence[tuple[CharSpan, Number]], question: str) -> Number | None:
    """Return the number of the last sentence with the most words of the question; None if all have too few."""
    question_numbers, question_words = numbers_in_question(question), content_words(question)
    best, most_shared = None, 0
    for sentence, number in stated:
        # "First, we need .." says what will be done, not what came of it.
        if number.value in question_numbers or phrases.PLAN_START.match(text, sentence.start):
            continue
        shared = len(question_words & content_words(text[slice(*sentence)]))
        if shared > most_shared and shared / len(question_words) >= _MIN_SHARED_WORDS:
            best, most_shared = number, shared
    return best


def _stated_number(
    text: str, span: CharSpan, question_numbers: frozenset[float], *, prefer_last: bool = False
) -> Number | None:
    """Return the number that a part of a text states; one that the question gives only if there is no other.

    Of several numbers it is the one after the last equals sign, else the first. With `prefer_last` it is the one
    after the last verb, else the last.
    """
    candidates = _candidate_numbers(text, span, question_numbers)
    if len(candidates) <= 1:
        return candidates[0] if candidates else None
    if _leaves_open(text, span, candidates, single_expected=not prefer_last):
        return None
    # Numbers after "because" or "compared" are reasons.
    subclause = _SUBCLAUSE.search(text, candidates[0].end, span.end)
    if subclause is not None:
        candidates = [number for number in candidates if number.start < subclause.start()]
    # "rises from 3 to 5" states 5.
    pairs = pairwise(candidates)
    range_ends = [second for first, second in pairs if _RANGE_TO.fullmatch(text, first.end, second.start)]
    if range_ends:
        return range_ends[-1]
    # The result is after the last equals sign or verb.
    anchor_pattern = _VALUE_ANCHOR if prefer_last else _EQUALS_SIGN
    anchors = list(anchor_pattern.finditer(text, span.start, candidates[-1].start))
    if anchors:
        return next(number for number in candidates if number.start >= anchors[-1].start())
    return candidates[-1 if prefer_last else 0]


def _candidate_numbers(text: str, span: CharSpan, question_numbers: frozenset[float]) -> list[Number]:
    """Return the numbers in digits that the question does not give, else those in words, else all in digits."""
    digits = [number for number in find_numbers(text, *span) if not _is_negated(text, number)]
    words = list(find_number_words(text, *span))
    new_digits = [number for number in digits if number.value not in question_numbers]
    new_words = [number for number in words if number.value not in question_numbers]
    return new_digits or (new_words if digits else words) or digits


def _leaves_open(text: str, span: CharSpan, numbers: Sequence[Number], *, single_expected: bool = True) -> bool:
    """Return True when a part of a text leaves open which of several numbers it means.

    "3 or 5" does. Where a single number is expected, so do a row of numbers and "between 3 and 5".
    """
    # 0.5 beside 50 is a share written twice.
    pairs = [
        (first, second) for first, second in pairwise(numbers) if second.value not in (first.value, 100 * first.value)
    ]
    if any(_OR_BETWEEN.fullmatch(text, first.end, second.start) for first, second in pairs):
        return True
    if not single_expected or not pairs:
        return False
    if _NUMBER_ROW.match(text, span.start, span.end):
        return True
    return any(
        _BETWEEN_WORD.search(text, span.start, first.start) and text[first.end : second.start].strip() == "and"
        for first, second in pairs
    )


def _is_negated(text: str, number: Number) -> bool:
    return _NEGATED_BEFORE.search(text, max(0, number.start - 5), number.start) is not None


def _to_extraction(text: str, number: Number, rule: str) -> Extraction:
    start, end = number.start, number.end
    # A dollar sign on both sides is LaTeX, not a price.
    start += text[start] == "$" == text[end : end + 1]
    return Extraction(text[start:end].strip(), rule, start, end, number=number.value)
