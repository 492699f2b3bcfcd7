r"""Numbers and coordinates as models write them: 1,234.5, 3/4, \frac{3}{4}, 2.5 x 10^{-3}, twenty-five, [1, 2, 3, 4].

Dates and ordinals are not numbers. The coordinate system of coordinates is never guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from mmrl.benchmarks.extraction.text import CharSpan
from mmrl_rewards.number_words import BELOW_100, ONES, SCALES, TENS

_MAX_NUMBER_CHARS: Final = 40  # characters of the longest number; more digits are not an answer
_MAX_SINGLE_CHARS: Final = 200  # characters of the longest text that may be one number
_MAX_EXPONENT: Final = 300  # exponents from here on overflow or are not an answer
_LABEL_WINDOW: Final = 14  # characters before a number in which a word such as "Step" makes it a label
_PRONOUN_WINDOW: Final = 9  # characters before "one" in which a word such as "the" makes it a pronoun
_NUMBER: Final = re.compile(
    r"(?<![A-Za-z0-9_.^\\{-])(?<!\d[:/])(?P<sign>[-+]?)(?:[$\u20ac\u00a3\u00a5S][ ]?)?"
    r"(?P<digits>\d{1,3}(?:(?:,|\{,\}|\\[,!])\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:[ ]?(?:[x\u00d7*\u00b7]|\\times|\\cdot)[ ]?10[ ]?(?:\^|\*\*)?[ ]?[{(]?(?P<power>[-+]?\d{1,3})[})]?"
    r"|[eE](?P<exponent>[-+]?\d{1,3})(?![\w.])"
    r"|[ ]?/[ ]?(?P<under>\d+(?:\.\d+)?)(?![\w/.]))?"
)
_FRACTION: Final = re.compile(
    r"(?P<sign>-?)\\[dt]?frac\s*\{\s*(?P<over>-?\d{1,20}(?:\.\d{1,20})?)\s*\}"
    r"\s*\{\s*(?P<below>\d{1,20}(?:\.\d{1,20})?)\s*\}"
)
_THOUSANDS_SEPARATOR: Final = re.compile(r"[,{}\\!]")  # signs between groups of three digits, LaTeX's included
_NON_NUMBER_SUFFIX: Final = re.compile(
    r"(?:st|nd|rd|th)\b|\^(?!\s*\{?\s*(?:\\circ|°|o\b))|:\d|-\d+-\d|/\d+/\d|[A-Za-z]{0,3}_"
)
_LABEL_BEFORE: Final = re.compile(
    r"(?:step|figure|fig\.|table|equation|eq\.|question|example|option|problem|part|case|page|chapter|section|line|no\.|"
    r"january|february|march|april|may|june|july|august|september|october|november|december)[ ]{0,3}[(#]?$",
    re.IGNORECASE,
)
_LIST_ITEM_START: Final = re.compile(r"(?:^|\n)[ \t]*[(]?$")
_LIST_MARKER_END: Final = re.compile(r"[.)][ \t]+(?!(?:this|that) is\b|because\b|explanation\b)\S", re.IGNORECASE)
_NUMBER_WORD: Final = re.compile(
    rf"\b(?:{'|'.join(TENS)})(?:[- ](?:{'|'.join(ONES[1:10])}))?\b|\b(?:{'|'.join(ONES)})\b", re.IGNORECASE
)
_SCALE_WORD: Final = re.compile(r"[ -](hundred|thousand|million|billion)\b", re.IGNORECASE)
_NOT_COUNT_AFTER: Final = re.compile(
    r"\s*(?:of|another|that|who|which|with|can|must|side|hand|way|by|could|might|should|would)\b", re.IGNORECASE
)
_PRONOUN_BEFORE: Final = re.compile(
    r"(?:\b(?:no|the|this|that|which|each|any|every|another|other|the only|first|last|same)[ -]|-)$", re.I
)
_COORDINATE: Final = r"([-+]?\d{1,9}(?:\.\d{1,9})?)"
_COORDINATE_SEPARATOR: Final = r"\s{0,9}[,\s]\s{0,9}"
_PAIR: Final = rf"{_COORDINATE}{_COORDINATE_SEPARATOR}{_COORDINATE}"
# Four numbers in brackets, or two pairs of them in parentheses.
BOX_PATTERN: Final = re.compile(
    rf"[\[(<]\s{{0,9}}{_PAIR}{_COORDINATE_SEPARATOR}{_PAIR}\s{{0,9}}[\])>]"
    rf"|\(\s{{0,9}}{_PAIR}\s{{0,9}}\)\s{{0,9}},?\s{{0,9}}\(\s{{0,9}}{_PAIR}\s{{0,9}}\)"
)
# Two numbers in brackets, after x= and y=, or in point tags.
POINT_PATTERN: Final = re.compile(
    rf"[\[(]\s{{0,9}}{_PAIR}\s{{0,9}}[\])]"
    rf"|\bx\"?\s{{0,9}}[=:]\s{{0,9}}\"?{_COORDINATE}\"?\s{{0,9}},?\s{{0,9}}\"?y\"?\s{{0,9}}[=:]\s{{0,9}}\"?{_COORDINATE}"
    rf"|<point>\s{{0,9}}{_PAIR}\s{{0,9}}</point>"
)


class Number(NamedTuple):
    """A number in a text."""

    value: float
    start: int  # first character, which may be a sign or a currency
    end: int  # character after it


def find_numbers(text: str, start: int = 0, end: int | None = None) -> Iterator[Number]:
    """Yield the numbers in digits in reading order; no ordinals, dates, times, labels, list markers or exponents."""
    stop = len(text) if end is None else end
    # LaTeX fractions come first, since their parts must not count as separate numbers.
    fractions = []
    if "frac" in text:
        for match in _FRACTION.finditer(text, start, stop):
            if float(match["below"]):
                value = float(match["over"]) / float(match["below"])
                fractions.append(Number(-value if match["sign"] else value, match.start(), match.end()))
    numbers = list(fractions)
    for match in _NUMBER.finditer(text, start, stop):
        number = _parse_value(match)
        if number is None or _NON_NUMBER_SUFFIX.match(text, match.end()) or _is_label(text, match):
            continue
        # Eight fractions suffice, and a bound keeps the time linear in the text.
        if not any(fraction.start <= match.start() < fraction.end for fraction in fractions[:8]):
            numbers.append(Number(number, match.start(), match.end()))
    yield from sorted(numbers, key=lambda number: number.start) if fractions else numbers


def find_number_words(text: str, start: int = 0, end: int | None = None) -> Iterator[Number]:
    """Yield the numbers in words up to 99, and these times a hundred, thousand, million or billion."""
    stop = len(text) if end is None else end
    for match in _NUMBER_WORD.finditer(text, start, stop):
        word = match[0].lower()
        window = max(0, match.start() - _PRONOUN_WINDOW), match.start()
        # The pronoun in "the one" or "one of" is not a number.
        if word == "one" and (_NOT_COUNT_AFTER.match(text, match.end()) or _PRONOUN_BEFORE.search(text, *window)):
            continue
        value, end = BELOW_100[word.replace("-", " ")], match.end()
        scale = _SCALE_WORD.match(text, end)
        if scale:
            value, end = value * SCALES[scale[1].lower()], scale.end()
        yield Number(float(value), match.start(), end)


def parse_single_number(text: str) -> float | None:
    """Return the one number of a short text, with or without a unit; None for none, or for several."""
    numbers = list(find_numbers(text)) if len(text) <= _MAX_SINGLE_CHARS else []
    return numbers[0].value if len(numbers) == 1 else None


def find_coordinates(pattern: re.Pattern[str], text: str) -> Iterator[tuple[tuple[float, ...], CharSpan]]:
    """Yield the coordinates and the place of everything that `BOX_PATTERN` or `POINT_PATTERN` finds."""
    for match in pattern.finditer(text):
        # Only the groups of the alternative that fits hold text.
        yield tuple(map(float, filter(None, match.groups()))), CharSpan(*match.span())


def _parse_value(match: re.Match[str]) -> float | None:
    """Return the value of a match; None for one that is too long, too large or divided by zero."""
    if match.end() - match.start() > _MAX_NUMBER_CHARS:
        return None
    value = float(_THOUSANDS_SEPARATOR.sub("", match["digits"]))
    exponent = match["power"] or match["exponent"]
    if exponent:
        # 10.0 ** 400 would raise OverflowError.
        value *= 10.0 ** int(exponent) if abs(int(exponent)) < _MAX_EXPONENT else math.inf
    elif match["under"]:
        denominator = float(match["under"])
        value = value / denominator if denominator else math.inf
    if not math.isfinite(value):
        return None
    return -value if match["sign"] == "-" else value


def _is_label(text: str, match: re.Match[str]) -> bool:
    """Return True for a number that counts steps, figures, days of a month or the items of a list."""
    before = text[max(0, match.start() - _LABEL_WINDOW) : match.start("digits")]
    last = before.rstrip(" (#")[-1:]
    # The check of one character first: the pattern is slow, and most numbers follow a space or a sign.
    if (last.isalpha() or last == ".") and _LABEL_BEFORE.search(before):
        return True
    # "3. Add the cats" is an item of a list; "3. This is the sum" is an answer.
    return bool(
        _LIST_MARKER_END.match(text, match.end())
        and _LIST_ITEM_START.search(before)
        and match["digits"].isdigit()
        and len(match["digits"]) < 3
    )
