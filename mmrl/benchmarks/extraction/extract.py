"""Extraction: the answer that a response gives, the rule that found it, and its place.

Rules are tried from the most explicit to the least: a box, answer tags, a phrase that announces the answer, an answer
given alone or first, and then the conclusion. A response that declines to answer has no answer, unless it announces one
anyway.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, Literal, TypeVar

from mmrl.answer import parse_answer_value
from mmrl.benchmarks.extraction import choice, open_answer, phrases
from mmrl.benchmarks.extraction.numbers import BOX_PATTERN, POINT_PATTERN, find_coordinates, find_numbers
from mmrl.benchmarks.extraction.options import AnswerOptions, ChosenOption, prepare_options
from mmrl.benchmarks.extraction.text import (
    TAIL_CHARS,
    CharSpan,
    Extraction,
    answer_span,
    last_answer_tag_span,
    last_boxed_span,
    sentence_end,
    to_plain_text,
)
from mmrl.types import AnswerType, Region

FoundT = TypeVar("FoundT", ChosenOption, Extraction)
ExpectedType = Literal["choice", "number", "list", "text", "box", "boxes", "point"]
_STRIP_CHARS: Final = " \t\r\n$\"'.:;,"
_BRACKETED_LIST: Final = re.compile(r"\[[^\[\]]{1,500}\]")
_MAX_TERSE_CHARS: Final = 100  # characters of the longest answer in tags that is not an explanation
_MAX_NUMBER_WORDS: Final = 5  # spaces in a number with its unit and a word such as "about"


def extract(
    response: str, expected_type: ExpectedType, question: str = "", options: tuple[str, ...] = ()
) -> Extraction:
    """Find the answer to a question in a response.

    The numbers and words of `question` distinguish a repetition from an answer; `options` are the texts of its options.
    """
    answer = answer_span(response)
    if answer is None:
        return Extraction(None, "unclosed_thinking", 0, len(response), "truncated")
    if not response[answer.start : answer.end].strip():
        return Extraction(None, "empty", answer.start, answer.end, "no_answer")
    start = _search_start(response, answer, expected_type)
    text_with_emphasis = response[start : answer.end]
    # One rule for numbers looks for bold type, which plain text has lost.
    text = to_plain_text(text_with_emphasis)
    span = _tagged_response_span(text, expected_type) or CharSpan(0, len(text))
    text, text_with_emphasis = text[slice(*span)], text_with_emphasis[slice(*span)]
    match expected_type:
        case "choice":
            extraction = _extract_choice(text, question, prepare_options(options))
        case "number":
            extraction = _extract_number(text, text_with_emphasis, question)
        case "list":
            lists = list(_BRACKETED_LIST.finditer(text))
            extraction = Extraction(lists[-1][0], "last_list", *lists[-1].span()) if lists else _no_answer(text)
        case "text":
            extraction = _extract_text(text)
        case "boxes":
            extraction = _extract_boxes(text)
        case "box" | "point":
            extraction = _extract_coordinates(text, expected_type)
    return _shift(extraction, start + span.start)


def _search_start(response: str, answer: CharSpan, expected_type: ExpectedType) -> int:
    """Return the place in an answer from which the rules read it."""
    if expected_type == "boxes":
        # A JSON list cannot be read without its beginning.
        return answer.start
    # Only the end is searched for words: a conclusion is there, and the patterns take time.
    start = max(answer.start, answer.end - TAIL_CHARS)
    if expected_type == "text":
        tagged = last_answer_tag_span(response[answer.start : answer.end])
        # A text in tags is the answer as a whole, however long.
        if tagged and answer.start + tagged.start < start < answer.start + tagged.end:
            start = response.rindex("<", answer.start, answer.start + tagged.start)
    return start


def _read_explicit(text: str, read: Callable[[str, CharSpan, str], FoundT | None]) -> FoundT | None:
    """Return what `read` finds in the last box or else in the last answer tags, given their content and the rule."""
    for find_span, rule in ((last_boxed_span, "boxed"), (last_answer_tag_span, "answer_tag")):
        span = find_span(text)
        found = span and read(text, span, rule)
        if found:
            return found
    return None


def _extract_choice(text: str, question: str, options: AnswerOptions) -> Extraction:
    chosen = _read_explicit(text, partial(choice.option_in_span, options=options))
    chosen = chosen or choice.announced_option(text, options) or choice.leading_option(text, options)
    if chosen:
        return _from_option(chosen, options.letters)
    # A response of "A or B" chooses neither, and no later rule may pick one.
    if choice.is_ambiguous(text, options):
        return _no_answer(text)
    boxed = last_boxed_span(text)
    if boxed and next(find_numbers(text[slice(*boxed)]), None):
        # The response does answer, with a number that is none of the options.
        return _no_answer(text)
    # If one option says that the answer is unknown, a refusal may choose it.
    start = 0 if options.has_refusal_option else _resumption_start(text)
    if start is None:
        return _no_answer(text)
    chosen = choice.implied_option(text[start:], options, question)
    return _shift(_from_option(chosen, options.letters), start) if chosen else _no_answer(text)


def _extract_number(text: str, text_with_emphasis: str, question: str) -> Extraction:
    found = _read_explicit(text, open_answer.number_in_span) or open_answer.announced_number(text)
    if found:
        return found
    # A response of "3 or 5" states neither, and no later rule may pick one.
    if open_answer.is_ambiguous(text):
        return _no_answer(text)
    found = open_answer.lone_number(text, question) or open_answer.leading_number(text)
    if found:
        return found
    start = _resumption_start(text)
    if start is None:
        return _no_answer(text)
    rest = text[start:]
    found = open_answer.bold_number(rest, text_with_emphasis[start:], question)
    found = found or open_answer.concluding_number(rest, question)
    return _shift(found, start) if found else _no_answer(text)


def _extract_text(text: str) -> Extraction:
    """Return the content of a box or of answer tags, else what is announced, else the whole text."""
    # A box after the tags is the more explicit answer.
    boxed = last_boxed_span(text)
    if boxed:
        return _extract_span(text, boxed, "boxed")
    tagged = last_answer_tag_span(text)
    searched = tagged or CharSpan(0, len(text))
    tail_start = max(searched.start, searched.end - TAIL_CHARS)
    for offset in phrases.find_answer_phrases(text[tail_start : searched.end]):
        start = tail_start + offset
        announced = CharSpan(start, min(searched.end, sentence_end(text, start)))
        # An announcement may end the text; then an earlier one counts.
        if text[slice(*announced)].strip(_STRIP_CHARS):
            return _extract_span(text, announced, "answer_tag" if tagged else "announced_text")
    return _extract_span(text, searched, "answer_tag" if tagged else "whole_text")


def _extract_span(text: str, span: CharSpan, rule: str) -> Extraction:
    value = text[slice(*span)].strip(_STRIP_CHARS)
    if not value:
        return Extraction(None, "empty", *span, "no_answer")
    start = text.find(value, span.start)
    return Extraction(value, rule, start, start + len(value))


def _extract_boxes(text: str) -> Extraction:
    """Return the boxes of a JSON list with labels, in a code fence or not."""
    span = last_answer_tag_span(text) or CharSpan(0, len(text))
    tail_start = max(0, len(text) - TAIL_CHARS)
    # The tail alone is tried, too, because a long explanation before the list may have brackets.
    for start in (span.start, max(span.start, tail_start)):
        inner = text[start : span.end]
        try:
            regions = parse_answer_value(AnswerType.BOXES, inner[inner.find("[") : inner.rfind("]") + 1])
        except ValueError:
            continue
        return Extraction(inner.strip(), "json_boxes", start, span.end, regions=regions)
    return _shift(_no_answer(text[tail_start:]), tail_start)


def _extract_coordinates(text: str, expected_type: Literal["box", "point"]) -> Extraction:
    """Return the last box or point in answer tags, else in a box, else anywhere."""
    searched = (
        (last_answer_tag_span(text), "answer_tag"),
        (last_boxed_span(text), "boxed"),
        (CharSpan(0, len(text)), f"last_{expected_type}"),
    )
    for span, rule in searched:
        if span is None:
            continue
        inner = text[slice(*span)]
        found = list(find_coordinates(BOX_PATTERN, inner))
        if not found and expected_type == "point":
            found = list(find_coordinates(POINT_PATTERN, inner))
        if found:
            values, place = found[-1]
            # As a point, a box is its centre.
            if expected_type == "point" and len(values) == 4:
                values = ((values[0] + values[2]) / 2, (values[1] + values[3]) / 2)
            start, end = span.start + place.start, span.start + place.end
            return Extraction(text[start:end], rule, start, end, regions=(Region(values),))
    return _no_answer(text)


def _tagged_response_span(text: str, expected_type: ExpectedType) -> CharSpan | None:
    """Return the content of answer tags that hold a whole explanation; None where they hold a bare answer."""
    tagged = last_answer_tag_span(text) if expected_type in ("choice", "number") else None
    if tagged is None:
        return None
    inner = text[slice(*tagged)]
    is_sentence = expected_type == "number" and inner.count(" ") > _MAX_NUMBER_WORDS
    if len(inner) <= _MAX_TERSE_CHARS and not is_sentence and not any(phrases.find_answer_phrases(inner)):
        return None
    boxed = last_boxed_span(text)
    return None if boxed and boxed.start > tagged.end else tagged


def _resumption_start(text: str) -> int | None:
    """Return the position from which a text without an announcement may answer; None if it declines to answer."""
    refusal = phrases.find_refusal(text)
    if refusal is None:
        return 0
    # After a refusal a response may still continue to answer.
    resumption = phrases.RESUMPTION.search(text, refusal[1])
    return resumption and resumption.start()


def _no_answer(text: str) -> Extraction:
    refusal = phrases.find_refusal(text)
    if refusal:
        return Extraction(None, "refusal", *refusal, "refusal")
    return Extraction(None, "nothing", 0, len(text), "no_answer")


def _from_option(chosen: ChosenOption, letters: tuple[str, ...]) -> Extraction:
    return Extraction(letters[chosen.option_index], chosen.rule, chosen.start, chosen.end)


def _shift(extraction: Extraction, offset: int) -> Extraction:
    """Return the extraction from a part of the response that begins at `offset`, with places in the whole response."""
    if not offset:
        return extraction
    return replace(extraction, start=extraction.start + offset, end=extraction.end + offset)
