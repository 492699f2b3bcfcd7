"""Coordinates as models write them: JSON, tuples, tags of several models, calls of a mouse. No frame is guessed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from mmrl.answer import read
from mmrl.benchmarks.extraction.text import Span
from mmrl.types import Kind, Region

_NUMBER: Final = r"([-+]?\d{1,9}(?:\.\d{1,9})?)"
_GAP: Final = r"\s{0,9}[,\s]\s{0,9}"
_BOXES: Final = re.compile(
    rf"[\[(<]\s{{0,9}}{_NUMBER}{_GAP}{_NUMBER}{_GAP}{_NUMBER}{_GAP}{_NUMBER}\s{{0,9}}[\])>]"
    rf"|\(\s{{0,9}}{_NUMBER}{_GAP}{_NUMBER}\s{{0,9}}\)\s{{0,9}},?\s{{0,9}}\(\s{{0,9}}{_NUMBER}{_GAP}{_NUMBER}\s{{0,9}}\)"
)
_POINTS: Final = re.compile(
    rf"[\[(]\s{{0,9}}{_NUMBER}{_GAP}{_NUMBER}\s{{0,9}}[\])]"
    rf"|\bx\"?\s{{0,9}}[=:]\s{{0,9}}\"?{_NUMBER}\"?\s{{0,9}},?\s{{0,9}}\"?y\"?\s{{0,9}}[=:]\s{{0,9}}\"?{_NUMBER}"
    rf"|<point>\s{{0,9}}{_NUMBER}{_GAP}{_NUMBER}\s{{0,9}}</point>"
)


def boxes_in(text: str) -> Iterator[tuple[tuple[float, ...], Span]]:
    """Every run of four numbers in brackets, or of two pairs, with its place."""
    yield from _found(_BOXES, text)


def points_in(text: str) -> Iterator[tuple[tuple[float, ...], Span]]:
    """Every pair of numbers in brackets, x= and y=, or a point tag, with its place."""
    yield from _found(_POINTS, text)


def regions_in(text: str) -> tuple[Region, ...] | None:
    """A JSON list of boxes with labels, in a fence or not; None where there is no such list."""
    start, end = text.find("["), text.rfind("]")
    try:
        regions: tuple[Region, ...] = read(Kind.BOXES, text[start : end + 1])
    except ValueError:
        return None
    return regions


def _found(pattern: re.Pattern[str], text: str) -> Iterator[tuple[tuple[float, ...], Span]]:
    for match in pattern.finditer(text):
        yield tuple(float(number) for number in match.groups() if number is not None), Span(*match.span())
