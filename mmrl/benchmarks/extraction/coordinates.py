"""Coordinates as models write them: JSON, tuples, tags, mouse calls. Their coordinate system is never guessed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from mmrl.answer import parse_answer_value
from mmrl.benchmarks.extraction.text import CharSpan
from mmrl.types import AnswerType, Region

_NUMBER: Final = r"([-+]?\d{1,9}(?:\.\d{1,9})?)"
_SEPARATOR: Final = r"\s{0,9}[,\s]\s{0,9}"
_PAIR: Final = rf"{_NUMBER}{_SEPARATOR}{_NUMBER}"
_BOX: Final = re.compile(
    rf"[\[(<]\s{{0,9}}{_PAIR}{_SEPARATOR}{_PAIR}\s{{0,9}}[\])>]"
    rf"|\(\s{{0,9}}{_PAIR}\s{{0,9}}\)\s{{0,9}},?\s{{0,9}}\(\s{{0,9}}{_PAIR}\s{{0,9}}\)"
)
"""Four numbers in brackets, or two pairs of them in parentheses."""
_POINT: Final = re.compile(
    rf"[\[(]\s{{0,9}}{_PAIR}\s{{0,9}}[\])]"
    rf"|\bx\"?\s{{0,9}}[=:]\s{{0,9}}\"?{_NUMBER}\"?\s{{0,9}},?\s{{0,9}}\"?y\"?\s{{0,9}}[=:]\s{{0,9}}\"?{_NUMBER}"
    rf"|<point>\s{{0,9}}{_PAIR}\s{{0,9}}</point>"
)
"""Two numbers in brackets, after x= and y=, or in point tags."""


def find_boxes(text: str) -> Iterator[tuple[tuple[float, ...], CharSpan]]:
    """Yield the four coordinates and the place of every box."""
    yield from _find_coordinates(_BOX, text)


def find_points(text: str) -> Iterator[tuple[tuple[float, ...], CharSpan]]:
    """Yield the two coordinates and the place of every point."""
    yield from _find_coordinates(_POINT, text)


def parse_labelled_boxes(text: str) -> tuple[Region, ...] | None:
    """Return the boxes of a JSON list with labels, in a code fence or not; None where there is no such list."""
    start, end = text.find("["), text.rfind("]")
    try:
        regions: tuple[Region, ...] = parse_answer_value(AnswerType.BOXES, text[start : end + 1])
    except ValueError:
        return None
    return regions


def _find_coordinates(pattern: re.Pattern[str], text: str) -> Iterator[tuple[tuple[float, ...], CharSpan]]:
    for match in pattern.finditer(text):
        yield tuple(float(number) for number in match.groups() if number is not None), CharSpan(*match.span())
