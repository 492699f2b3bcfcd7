"""What a response answers, by rule: the value, the rule that found it and the place it stands at.

Rules are tried from the most explicit to the least: a box, answer tags, a sentence that announces the answer, an answer
given alone or first, and then what the conclusion says. A response that declines to answer answers nothing, unless it
announces an answer all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from mmrl.benchmarks.extraction import choice, open_answer, phrases
from mmrl.benchmarks.extraction.coordinates import find_boxes, find_points, parse_labelled_boxes
from mmrl.benchmarks.extraction.letters import ChosenOption
from mmrl.benchmarks.extraction.numbers import find_numbers
from mmrl.benchmarks.extraction.options import prepare_options
from mmrl.benchmarks.extraction.text import (
    TAIL_CHARS,
    CharSpan,
    answer_span,
    last_answer_tag_span,
    last_boxed_span,
    sentence_end,
    to_plain_text,
)
from mmrl.types import Region

_STRIP_CHARS: Final = " \t\r\n$\"'.:;,"
_MAX_TERSE_CHARS: Final = 100
"""Characters of an answer that is no explanation."""
_MAX_NUMBER_WORDS: Final = 5
"""Words of a number with its unit, and about."""
NoAnswerReason = Literal["", "no_answer", "refusal", "truncated"]
ExpectedType = Literal["choice", "number", "list", "text", "box", "boxes", "point"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractionQuery:
    """What the rules know of a question: its words, what is due, and the options where that is one of them."""

    expected_type: ExpectedType
    question: str = ""
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Extraction:
    """`value`: an option's letter, or a number, list, text or coordinates as written; None where there is none: `why`.

    `number` and `regions` are what a number and coordinates come to.
    """

    value: str | None
    rule: str
    start: int
    end: int
    no_answer_reason: NoAnswerReason = ""
    number: float | None = None
    regions: tuple[Region, ...] = ()


def extract(response: str, query: ExtractionQuery) -> Extraction:
    """What a response answers to what was asked."""
    part = answer_span(response)
    if part is None:
        return Extraction(None, "unclosed_thinking", 0, len(response), "truncated")
    if not response[part.start : part.end].strip():
        return Extraction(None, "empty", part.start, part.end, "no_answer")
    start = max(part.start, part.end - TAIL_CHARS)
    marked = response[start : part.end]
    text = to_plain_text(marked)
    told = _tagged_response_span(text, query.expected_type) or CharSpan(0, len(text))
    return _shift(_extract_by_type(text[slice(*told)], marked[slice(*told)], query), start + told.start)


def _extract_by_type(text: str, text_with_emphasis: str, query: ExtractionQuery) -> Extraction:
    match query.expected_type:
        case "choice":
            return _extract_choice(text, query)
        case "number":
            return _extract_number(text, text_with_emphasis, query)
        case "list":
            hit = open_answer.last_list(text)
            return Extraction(hit.value, hit.rule, hit.start, hit.end) if hit else _no_answer(text)
        case "text":
            return _extract_text(text)
        case "boxes":
            return _extract_boxes(text)
        case "box" | "point":
            return _extract_coordinates(text, query.expected_type)


def _extract_choice(text: str, query: ExtractionQuery) -> Extraction:
    options = prepare_options(query.options)
    for find, rule in ((last_boxed_span, "boxed"), (last_answer_tag_span, "answer_tag")):
        if (span := find(text)) and (hit := choice.option_in_span(text, span, options, rule)):
            return _from_option(hit, options.letters)
    hit = choice.announced_option(text, options) or choice.leading_option(text, options)
    if hit:
        return _from_option(hit, options.letters)
    if choice.is_ambiguous(text, options):
        return _no_answer(text)
    if (span := last_boxed_span(text)) and next(find_numbers(text[slice(*span)]), None):
        return _no_answer(text)  # it does answer, with a number that is no option
    at = 0 if options.has_refusal_option else _resumption_start(text)
    hit = None if at is None else choice.implied_option(text[at:], options, query.question)
    if at is None or hit is None:
        return _no_answer(text)
    return _shift(_from_option(hit, options.letters), at)


def _extract_number(text: str, text_with_emphasis: str, query: ExtractionQuery) -> Extraction:
    for find, rule in ((last_boxed_span, "boxed"), (last_answer_tag_span, "answer_tag")):
        if (span := find(text)) and (hit := open_answer.number_in_span(text, span, rule)):
            return _from_open_answer(hit)
    if hit := open_answer.announced_number(text):
        return _from_open_answer(hit)
    if open_answer.is_ambiguous(text):
        return _no_answer(text)
    if hit := open_answer.lone_number(
        text, open_answer.numbers_in_question(query.question)
    ) or open_answer.leading_number(text):
        return _from_open_answer(hit)
    at = _resumption_start(text)
    if at is None:
        return _no_answer(text)
    known, rest = open_answer.numbers_in_question(query.question), text[at:]
    hit = open_answer.bold_number(rest, text_with_emphasis[at:], known) or open_answer.concluding_number(
        rest, query.question, known
    )
    return _shift(_from_open_answer(hit), at) if hit else _no_answer(text)


def _tagged_response_span(text: str, expected_type: ExpectedType) -> CharSpan | None:
    """Answer tags around more than an answer: what stands there is read as a response, unless a box comes after."""
    told = last_answer_tag_span(text) if expected_type in ("choice", "number") else None
    inner = text[slice(*told)] if told else ""
    sentence = expected_type == "number" and inner.count(" ") > _MAX_NUMBER_WORDS
    if told is None or not (len(inner) > _MAX_TERSE_CHARS or sentence or any(phrases.find_answer_phrases(inner))):
        return None
    box = last_boxed_span(text)
    return None if box and box.start > told.end else told


def _shift(extraction: Extraction, offset: int) -> Extraction:
    return replace(extraction, start=extraction.start + offset, end=extraction.end + offset) if offset else extraction


def _resumption_start(text: str) -> int | None:
    """From where a text that announces nothing may still answer: the start; after it declined, where it goes on to."""
    declined = phrases.find_refusal(text)
    if declined is None:
        return 0
    resumed = phrases.RESUMPTION.search(text, declined[1])
    return resumed and resumed.start()


def _no_answer(text: str) -> Extraction:
    declined = phrases.find_refusal(text)
    return (
        Extraction(None, "refusal", *declined, "refusal")
        if declined
        else Extraction(None, "nothing", 0, len(text), "no_answer")
    )


def _from_option(chosen: ChosenOption, letters: tuple[str, ...]) -> Extraction:
    return Extraction(letters[chosen.option_index], chosen.rule, chosen.start, chosen.end)


def _from_open_answer(answer: open_answer.OpenAnswer) -> Extraction:
    return Extraction(answer.value, answer.rule, answer.start, answer.end, number=answer.number)


def _extract_text(text: str) -> Extraction:
    """Free text: what stands in a box or in tags, what is announced, else all there is."""
    if span := last_boxed_span(text):
        return _extract_span(text, span, "boxed")
    told = last_answer_tag_span(text)
    part = told or CharSpan(0, len(text))
    for place in phrases.find_answer_phrases(text[slice(*part)]):
        at = part.start + place
        span = CharSpan(at, min(part.end, sentence_end(text, at)))
        if text[slice(*span)].strip(_STRIP_CHARS):
            return _extract_span(text, span, "answer_tag" if told else "announced_text")
    return _extract_span(text, part, "answer_tag" if told else "whole_text")


def _extract_span(text: str, span: CharSpan, rule: str) -> Extraction:
    value = text[slice(*span)].strip(_STRIP_CHARS)
    start = text.find(value, span.start)
    return (
        Extraction(value, rule, start, start + len(value)) if value else Extraction(None, "empty", *span, "no_answer")
    )


def _extract_boxes(text: str) -> Extraction:
    span = last_answer_tag_span(text) or CharSpan(0, len(text))
    regions = parse_labelled_boxes(text[slice(*span)])
    if regions is None:
        return _no_answer(text)
    return Extraction(text[slice(*span)].strip(), "json_boxes", *span, regions=regions)


def _extract_coordinates(text: str, expected_type: Literal["box", "point"]) -> Extraction:
    """The last box or point within answer tags or a box, else in all of the text; a box counts as its centre."""
    for find, rule in (
        (last_answer_tag_span, "answer_tag"),
        (last_boxed_span, "boxed"),
        (lambda text: CharSpan(0, len(text)), f"last_{expected_type}"),
    ):
        span = find(text)
        inner = text[slice(*span)] if span else ""
        found = [*find_boxes(inner)] or ([*find_points(inner)] if expected_type == "point" else [])
        if span and found:
            values, place = found[-1]
            if expected_type == "point" and len(values) == 4:
                values = ((values[0] + values[2]) / 2, (values[1] + values[3]) / 2)
            start, end = span.start + place.start, span.start + place.end
            return Extraction(text[start:end], rule, start, end, regions=(Region(values),))
    return _no_answer(text)
