"""Coordinates as models write them: JSON, tuples, tags of several models, calls of a mouse. No frame is guessed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from mmrl.answer import parse_answer_value
from mmrl.benchmarks.extraction.text import CharSpan
from mmrl.types import AnswerType, Region

_NUMBER_PATTERN: Final = r"([-+]?\d{1,9}(?:\.\d{1,9})?)"
_SEPARATOR: Final = r"\s{0,9}[,\s]\s{0,9}"
_BOX_PATTERN: Final = re.compile(
    rf"[\[(<]\s{{0,9}}{_NUMBER_PATTERN}{_SEPARATOR}{_NUMBER_PATTERN}{_SEPARATOR}{_NUMBER_PATTERN}{_SEPARATOR}{_NUMBER_PATTERN}\s{{0,9}}[\])>]"
    rf"|\(\s{{0,9}}{_NUMBER_PATTERN}{_SEPARATOR}{_NUMBER_PATTERN}\s{{0,9}}\)\s{{0,9}},?\s{{0,9}}\(\s{{0,9}}{_NUMBER_PATTERN}{_SEPARATOR}{_NUMBER_PATTERN}\s{{0,9}}\)"
)
_POINT_PATTERN: Final = re.compile(
    rf"[\[(]\s{{0,9}}{_NUMBER_PATTERN}{_SEPARATOR}{_NUMBER_PATTERN}\s{{0,9}}[\])]"
    rf"|\bx\"?\s{{0,9}}[=:]\s{{0,9}}\"?{_NUMBER_PATTERN}\"?\s{{0,9}},?\s{{0,9}}\"?y\"?\s{{0,9}}[=:]\s{{0,9}}\"?{_NUMBER_PATTERN}"
    rf"|<point>\s{{0,9}}{_NUMBER_PATTERN}{_SEPARATOR}{_NUMBER_PATTERN}\s{{0,9}}</point>"
)


def find_boxes(text: str) -> Iterator[tuple[tuple[float, ...], CharSpan]]:
    """Every run of four numbers in brackets, or of two pairs, with its place."""
    yield from _find_coordinates(_BOX_PATTERN, text)


def find_points(text: str) -> Iterator[tuple[tuple[float, ...], CharSpan]]:
    """Every pair of numbers in brackets, x= and y=, or a point tag, with its place."""
    yield from _find_coordinates(_POINT_PATTERN, text)


def parse_labelled_boxes(text: str) -> tuple[Region, ...] | None:
    """A JSON list of boxes with labels, in a fence or not; None where there is no such list."""
    start, end = text.find("["), text.rfind("]")
    try:
        regions: tuple[Region, ...] = parse_answer_value(AnswerType.BOXES, text[start : end + 1])
    except ValueError:
        return None
    return regions


def _find_coordinates(pattern: re.Pattern[str], text: str) -> Iterator[tuple[tuple[float, ...], CharSpan]]:
    for match in pattern.finditer(text):
        yield tuple(float(number) for number in match.groups() if number is not None), CharSpan(*match.span())
