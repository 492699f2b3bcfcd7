"""Coordinates as models write them: JSON, tuples, tags, mouse calls. Their coordinate system is never guessed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from mmrl.benchmarks.extraction.text import CharSpan

_NUMBER: Final = r"([-+]?\d{1,9}(?:\.\d{1,9})?)"
_SEPARATOR: Final = r"\s{0,9}[,\s]\s{0,9}"
_PAIR: Final = rf"{_NUMBER}{_SEPARATOR}{_NUMBER}"
# Four numbers in brackets, or two pairs of them in parentheses.
BOX_PATTERN: Final = re.compile(
    rf"[\[(<]\s{{0,9}}{_PAIR}{_SEPARATOR}{_PAIR}\s{{0,9}}[\])>]"
    rf"|\(\s{{0,9}}{_PAIR}\s{{0,9}}\)\s{{0,9}},?\s{{0,9}}\(\s{{0,9}}{_PAIR}\s{{0,9}}\)"
)
# Two numbers in brackets, after x= and y=, or in point tags.
POINT_PATTERN: Final = re.compile(
    rf"[\[(]\s{{0,9}}{_PAIR}\s{{0,9}}[\])]"
    rf"|\bx\"?\s{{0,9}}[=:]\s{{0,9}}\"?{_NUMBER}\"?\s{{0,9}},?\s{{0,9}}\"?y\"?\s{{0,9}}[=:]\s{{0,9}}\"?{_NUMBER}"
    rf"|<point>\s{{0,9}}{_PAIR}\s{{0,9}}</point>"
)


def find_coordinates(pattern: re.Pattern[str], text: str) -> Iterator[tuple[tuple[float, ...], CharSpan]]:
    """Yield the coordinates and the place of everything that `BOX_PATTERN` or `POINT_PATTERN` finds."""
    for match in pattern.finditer(text):
        yield tuple(float(number) for number in match.groups() if number is not None), CharSpan(*match.span())
