"""What a response answers, by rule: the value, the rule that found it and the place it stands at.

Rules are tried from the most explicit to the least: a box, answer tags, a sentence that announces the answer, an answer
given alone or first, and then what the conclusion says. A response that declines to answer answers nothing, unless it
announces an answer all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from mmrl.benchmarks.extraction import choice, open_answer, phrases
from mmrl.benchmarks.extraction.coordinates import boxes_in, points_in, regions_in
from mmrl.benchmarks.extraction.letters import Choice
from mmrl.benchmarks.extraction.numbers import numbers
from mmrl.benchmarks.extraction.options import options_of
from mmrl.benchmarks.extraction.text import TAIL, Span, answering, last_box, last_tag, plain, sentence_end
from mmrl.types import Region

_BARE: Final = " \t\r\n$\"'.:;,"
_TERSE: Final = 100
"""Characters of an answer that is no explanation."""
_WORDS: Final = 5
"""Words of a number with its unit, and about."""
Why = Literal["", "no_answer", "refusal", "truncated"]
Wants = Literal["choice", "number", "list", "text", "box", "boxes", "point"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the rules know of a question: its words, what is due, and the options where that is one of them."""

    wants: Wants
    question: str = ""
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """`value`: an option's letter, or a number, list, text or coordinates as written; None where there is none: `why`.

    `number` and `regions` are what a number and coordinates come to.
    """

    value: str | None
    rule: str
    start: int
    end: int
    why: Why = ""
    number: float | None = None
    regions: tuple[Region, ...] = ()


def extract(response: str, asked: Asked) -> Found:
    """What a response answers to what was asked."""
    part = answering(response)
    if part is None:
        return Found(None, "unclosed_thinking", 0, len(response), "truncated")
    if not response[part.start : part.end].strip():
        return Found(None, "empty", part.start, part.end, "no_answer")
    start = max(part.start, part.end - TAIL)
    marked = response[start : part.end]
    text = plain(marked)
    told = _told(text, asked.wants) or Span(0, len(text))
    return _moved(_found(text[slice(*told)], marked[slice(*told)], asked), start + told.start)


def _found(text: str, marked: str, asked: Asked) -> Found:
    match asked.wants:
        case "choice":
            return _choice(text, asked)
        case "number":
            return _number(text, marked, asked)
        case "list":
            hit = open_answer.listed(text)
            return Found(hit.value, hit.rule, hit.start, hit.end) if hit else _nothing(text)
        case "text":
            return _text(text)
        case "boxes":
            return _boxes(text)
        case "box" | "point":
            return _coordinates(text, asked.wants)


def _choice(text: str, asked: Asked) -> Found:
    options = options_of(asked.options)
    for find, rule in ((last_box, "boxed"), (last_tag, "answer_tag")):
        if (span := find(text)) and (hit := choice.content(text, span, options, rule)):
            return _chosen(hit, options.letters)
    hit = choice.announced(text, options) or choice.first(text, options)
    if hit:
        return _chosen(hit, options.letters)
    if choice.undecided(text, options):
        return _nothing(text)
    if (span := last_box(text)) and next(numbers(text[slice(*span)]), None):
        return _nothing(text)  # it does answer, with a number that is no option
    at = 0 if options.declining else _resumed(text)
    hit = None if at is None else choice.implied(text[at:], options, asked.question)
    if at is None or hit is None:
        return _nothing(text)
    return _moved(_chosen(hit, options.letters), at)


def _number(text: str, marked: str, asked: Asked) -> Found:
    for find, rule in ((last_box, "boxed"), (last_tag, "answer_tag")):
        if (span := find(text)) and (hit := open_answer.content(text, span, rule)):
            return _figured(hit)
    if hit := open_answer.announced(text):
        return _figured(hit)
    if open_answer.undecided(text):
        return _nothing(text)
    if hit := open_answer.alone(text, open_answer.known(asked.question)) or open_answer.given(text):
        return _figured(hit)
    at = _resumed(text)
    if at is None:
        return _nothing(text)
    known, rest = open_answer.known(asked.question), text[at:]
    hit = open_answer.emphasised(rest, marked[at:], known) or open_answer.concluded(rest, asked.question, known)
    return _moved(_figured(hit), at) if hit else _nothing(text)


def _told(text: str, wants: Wants) -> Span | None:
    """Answer tags around more than an answer: what stands there is read as a response, unless a box comes after."""
    told = last_tag(text) if wants in ("choice", "number") else None
    inner = text[slice(*told)] if told else ""
    sentence = wants == "number" and inner.count(" ") > _WORDS
    if told is None or not (len(inner) > _TERSE or sentence or any(phrases.announcements(inner))):
        return None
    box = last_box(text)
    return None if box and box.start > told.end else told


def _moved(found: Found, by: int) -> Found:
    return replace(found, start=found.start + by, end=found.end + by) if by else found


def _resumed(text: str) -> int | None:
    """From where a text that announces nothing may still answer: the start; after it declined, where it goes on to."""
    declined = phrases.declined(text)
    if declined is None:
        return 0
    resumed = phrases.RESUMES.search(text, declined[1])
    return resumed and resumed.start()


def _nothing(text: str) -> Found:
    declined = phrases.declined(text)
    return (
        Found(None, "refusal", *declined, "refusal") if declined else Found(None, "nothing", 0, len(text), "no_answer")
    )


def _chosen(hit: Choice, letters: tuple[str, ...]) -> Found:
    return Found(letters[hit.place], hit.rule, hit.start, hit.end)


def _figured(hit: open_answer.Figure) -> Found:
    return Found(hit.value, hit.rule, hit.start, hit.end, number=hit.number)


def _text(text: str) -> Found:
    """Free text: what stands in a box or in tags, what is announced, else all there is."""
    if span := last_box(text):
        return _stripped(text, span, "boxed")
    told = last_tag(text)
    part = told or Span(0, len(text))
    for place in phrases.announcements(text[slice(*part)]):
        at = part.start + place
        span = Span(at, min(part.end, sentence_end(text, at)))
        if text[slice(*span)].strip(_BARE):
            return _stripped(text, span, "answer_tag" if told else "announced_text")
    return _stripped(text, part, "answer_tag" if told else "whole_text")


def _stripped(text: str, span: Span, rule: str) -> Found:
    value = text[slice(*span)].strip(_BARE)
    start = text.find(value, span.start)
    return Found(value, rule, start, start + len(value)) if value else Found(None, "empty", *span, "no_answer")


def _boxes(text: str) -> Found:
    span = last_tag(text) or Span(0, len(text))
    regions = regions_in(text[slice(*span)])
    if regions is None:
        return _nothing(text)
    return Found(text[slice(*span)].strip(), "json_boxes", *span, regions=regions)


def _coordinates(text: str, wants: Literal["box", "point"]) -> Found:
    """The last box or point within answer tags or a box, else in all of the text; a box counts as its centre."""
    for find, rule in (
        (last_tag, "answer_tag"),
        (last_box, "boxed"),
        (lambda text: Span(0, len(text)), f"last_{wants}"),
    ):
        span = find(text)
        inner = text[slice(*span)] if span else ""
        found = [*boxes_in(inner)] or ([*points_in(inner)] if wants == "point" else [])
        if span and found:
            values, place = found[-1]
            if wants == "point" and len(values) == 4:
                values = ((values[0] + values[2]) / 2, (values[1] + values[3]) / 2)
            start, end = span.start + place.start, span.start + place.end
            return Found(text[start:end], rule, start, end, regions=(Region(values),))
    return _nothing(text)
