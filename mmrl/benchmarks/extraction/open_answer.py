"""Which number, list or text a response gives where there are no options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

from mmrl.benchmarks.extraction import phrases
from mmrl.benchmarks.extraction.numbers import Number, numbers, words
from mmrl.benchmarks.extraction.text import (
    Span,
    content_words,
    last_box,
    last_tag,
    sentence_end,
    sentence_start,
    sentences,
)

_EQUALS: Final = re.compile(r"[=≈]|\b(?:is|are|equals)(?=\s)")
_ANCHOR: Final = re.compile(
    r"[=≈:是为有剩]"
    r"|\b(?:is|are|was|were|be|equals?|equal to|approximately|about|left|remain|gives?|get|have|has)(?=\s)",
    re.IGNORECASE,
)
_ASIDE: Final = re.compile(
    r",? (?:which|where|since|because|based on|after|compared|while|whereas|as)\b|[(]", re.IGNORECASE
)
_TO: Final = re.compile(r"[^\d\n.,]{0,12}\b(?:to)\b[ $€£]*")
_OR: Final = re.compile(r"[^\d\n.,]{0,12}(?:\bor\b|[ ]/[ ])[ $€£\\a-z{}]{0,12}")
_BETWEEN: Final = re.compile(r"\bbetween[^\d\n]{0,12}$", re.IGNORECASE)
_ROW: Final = re.compile(r"[^\w\n-]*-?[\d.]{1,12}(?:[ ]?,[ ]{0,2}(?:and[ ])?-?[\d.]{1,12})+[^\w\n]*\Z")
"""Numbers in a row and nothing else."""
_NOT: Final = re.compile(r"(?:\bnot|n't) $", re.IGNORECASE)
_GIVEN: Final = re.compile(
    r"[ \t]*(?:[A-Za-z%°²³$]+[ \t]*){0,2}[.!]?(?:[ \t]*\n|[ ]+(?:This|That|Because|Since|Explanation)\b)"
)
"""What comes after a number that is given first, to be explained."""
_LEADS: Final = "+-.\\S\u20ac\u00a3\u00a5"
"""What a number begins with, but for digits: signs, fractions, currencies."""
_LIST: Final = re.compile(r"\[[^\[\]]{1,500}\]")
_BOLD: Final = re.compile(r"\*\*[^*\n]{1,80}\*\*")
_CLOSING: Final = re.compile(r"\s*(?:I hope|let me know|please let|note that|if you)\b", re.IGNORECASE)


class Figure(NamedTuple):
    """A value as the response writes it, and where."""

    value: str
    rule: str
    start: int
    end: int
    number: float | None = None


def content(text: str, span: Span, rule: str) -> Figure | None:
    """The number that the content of a box or of answer tags is."""
    inner = text[slice(*span)]
    found = None if phrases.REFUSED.search(inner) else _in(inner, Span(0, len(inner)), frozenset())
    return _of(text, found and found._replace(start=span.start + found.start, end=span.start + found.end), rule)


@lru_cache(maxsize=4096)  # many responses answer one question
def known(question: str) -> frozenset[float]:
    """The numbers that a question tells."""
    return frozenset(number.value for number in (*numbers(question), *words(question)))


def announced(text: str) -> Figure | None:
    """The number that the last announcement of an answer names."""
    for at in phrases.announcements(text):
        part = Span(at, sentence_end(text, at))
        found = None if phrases.REFUSED.search(text, *part) else _in(text, part, frozenset())
        if found is not None:
            return _of(text, found, "announced_number")
    return None


def alone(text: str, asked: frozenset[float]) -> Figure | None:
    """The one number of a text that says little else."""
    if len(text) > 60 or phrases.REFUSED.search(text):
        return None
    found = [one for one in (*numbers(text), *words(text)) if not _denied(text, one)]
    found = [one for one in found if one.value not in asked] or found
    return _of(text, found[0], "lone_number") if len(found) == 1 else None


def given(text: str) -> Figure | None:
    """The number that a text begins with, alone in its line or to be explained, where nothing after it concludes."""
    lead = text.lstrip(" \t\n$")[:1]
    found = next(numbers(text), None) if lead.isdigit() or lead in _LEADS else None
    if found is None or text[: found.start].strip(" \t\n$") or not _GIVEN.match(text, found.end):
        return None
    rest = (part for part in sentences(text) if part.start >= found.end)
    return None if any(phrases.CONCLUDES.match(text, *part) for part in rest) else _of(text, found, "first_number")


def undecided(text: str) -> bool:
    """Whether a box, answer tags or else the last announcement names several numbers, and so none."""
    at = next(phrases.announcements(text), None)
    announced = None if at is None else Span(at, sentence_end(text, at))
    part = last_box(text) or last_tag(text) or announced
    inner = text[slice(*part)] if part else ""
    return _several(inner, Span(0, len(inner)), [*numbers(inner)])


def emphasised(text: str, marked: str, asked: frozenset[float]) -> Figure | None:
    """The number in bold in the last sentence that concludes, else the first in bold; `marked` has the marks."""
    bold = [Span(*match.span()) for match in _BOLD.finditer(marked)]
    stated = [found for span in bold if (found := _in(text, span, asked)) and found.value not in asked]
    concluding = [found for found in stated if phrases.concludes(text, sentence_start(text, found.start), found.start)]
    best = concluding[-1] if concluding else next(iter(stated), None)
    return _of(text, best, "bold_number")


def concluded(text: str, question: str, asked: frozenset[float]) -> Figure | None:
    """The number of the last sentence that concludes; else of the one most like the question; else of the last."""
    parts = [part for part in sentences(text) if not _CLOSING.match(text, part.start)][:60]
    stated = [(part, found) for part in parts if (found := _in(text, part, asked, last=True))]
    if not stated:
        return None
    wanted, result = content_words(question), _result(text)

    def standing(entry: tuple[Span, Number]) -> float:
        part, found = entry
        if phrases.concludes(text, *part) or (entry is stated[0] and found.value == result):
            return 2.0
        if found.value in asked or phrases.PLANS.match(text, part.start) or not wanted:
            return 0.0
        share = len(wanted & content_words(text[slice(*part)])) / len(wanted)
        return share if share >= 0.4 else 0.0

    return _of(text, max(stated, key=standing)[1], "concluding_number")


def _result(text: str) -> float | None:
    """What the last equation of a text comes to."""
    equals = text.rfind("=")
    return next((one.value for one in numbers(text, equals, equals + 40)), None) if equals >= 0 else None


def listed(text: str) -> Figure | None:
    """The last list in brackets."""
    found = [*_LIST.finditer(text)]
    return Figure(found[-1][0], "last_list", found[-1].start(), found[-1].end()) if found else None


def _in(text: str, part: Span, asked: frozenset[float], *, last: bool = False) -> Number | None:
    """The number that a part of a text states: after its last =, after its last verb, or first; not one asked about."""
    digits = [one for one in numbers(text, *part) if not _denied(text, one)]
    found = [one for one in digits if one.value not in asked]
    found = found or [one for one in words(text, *part) if one.value not in asked or not digits] or digits
    if len(found) <= 1:
        return found[0] if found else None
    if _several(text, part, found, plainly=not last):
        return None
    clause = _ASIDE.search(text, found[0].end, part.end)
    found = [one for one in found if clause is None or one.start < clause.start()]
    if ranges := [there for here, there in pairwise(found) if _TO.fullmatch(text, here.end, there.start)]:
        return ranges[-1]
    anchors = _ANCHOR if last else _EQUALS
    for match in reversed([*anchors.finditer(text, part.start, found[-1].start)]):
        return next(one for one in found if one.start >= match.start())
    return found[-1 if last else 0]


def _several(text: str, part: Span, found: Sequence[Number], *, plainly: bool = True) -> bool:
    """Whether a part of a text leaves open which of several numbers it is.

    Where it states one `plainly`, a row of them and two that it lies between do so as well.
    """
    pairs = [(here, there) for here, there in pairwise(found) if there.value not in (here.value, 100 * here.value)]
    if any(_OR.fullmatch(text, here.end, there.start) for here, there in pairs):
        return True
    if not plainly or not pairs:
        return False
    return _ROW.match(text, part.start, part.end) is not None or any(
        _BETWEEN.search(text, part.start, here.start) and text[here.end : there.start].strip() == "and"
        for here, there in pairs
    )


def _denied(text: str, number: Number) -> bool:
    """Whether a number is said not to be it."""
    return _NOT.search(text, max(0, number.start - 5), number.start) is not None


def _of(text: str, number: Number | None, rule: str) -> Figure | None:
    if number is None:
        return None
    start, end = number.start, number.end
    start += text[start] == "$" == text[end : end + 1]  # what LaTeX sets apart is no price
    return Figure(text[start:end].strip(), rule, start, end, number.value)
