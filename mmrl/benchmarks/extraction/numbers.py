r"""Numbers as models write them: 1,234.5, 3/4, \frac{3}{4}, 2.5 x 10^{-3}, twenty-five; never dates or ordinals."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

_MAX_NUMBER_CHARS: Final = 40  # characters of a number
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
_THOUSANDS_SEPARATOR: Final = re.compile(r"[,{}\\!]")
"""What stands between thousands."""
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
_ONES: Final = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS: Final = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_WORD_VALUES: Final[Mapping[str, int]] = MappingProxyType(
    {word: value for value, word in enumerate(_ONES)} | {word: 10 * value for value, word in enumerate(_TENS, 2)}
)
_SCALE_VALUES: Final[Mapping[str, int]] = MappingProxyType(
    {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
)
_NUMBER_WORD: Final = re.compile(
    rf"\b(?:{'|'.join(_TENS)})(?:[- ](?:{'|'.join(_ONES[1:10])}))?\b|\b(?:{'|'.join(_ONES)})\b", re.IGNORECASE
)
_SCALE_WORD: Final = re.compile(r"[ -](hundred|thousand|million|billion)\b", re.IGNORECASE)
_NOT_COUNT_AFTER: Final = re.compile(
    r"\s*(?:of|another|that|who|which|with|can|must|side|hand|way|by|could|might|should|would)\b", re.IGNORECASE
)
_PRONOUN_BEFORE: Final = re.compile(
    r"(?:\b(?:no|the|this|that|which|each|any|every|another|other|the only|first|last|same)[ -]|-)$", re.I
)


class Number(NamedTuple):
    """A number and where it stands."""

    value: float
    start: int
    end: int


def find_numbers(text: str, start: int = 0, end: int | None = None) -> Iterator[Number]:
    """Numbers written in digits, in reading order; no ordinals, dates, clock times, labels, list markers, exponents."""
    stop = len(text) if end is None else end
    fractions = [*_find_fractions(text, start, stop)] if "frac" in text else []
    found = fractions[:]
    for match in _NUMBER.finditer(text, start, stop):
        value = _parse_value(match)
        if value is None or _NON_NUMBER_SUFFIX.match(text, match.end()) or _is_label(text, match):
            continue
        if not any(one.start <= match.start() < one.end for one in fractions[:8]):
            found.append(Number(value, match.start(), match.end()))
    yield from sorted(found, key=lambda one: one.start) if fractions else found


def find_number_words(text: str, start: int = 0, end: int | None = None) -> Iterator[Number]:
    """Numbers written as words, up to hundreds and beyond in round steps; not the pronoun in "the one" or "one of"."""
    stop = len(text) if end is None else end
    for match in _NUMBER_WORD.finditer(text, start, stop):
        word = match[0].lower()
        if word == "one" and (
            _NOT_COUNT_AFTER.match(text, match.end())
            or _PRONOUN_BEFORE.search(text, max(0, match.start() - 9), match.start())
        ):
            continue
        value = sum(_WORD_VALUES[part] for part in re.split("[- ]", word))
        scale = _SCALE_WORD.match(text, match.end())
        yield Number(
            float(value * _SCALE_VALUES[scale[1].lower()] if scale else value), match.start(), (scale or match).end()
        )


def parse_single_number(text: str) -> float | None:
    """The one number that a short text is, with or without a unit; None where there is none, or more."""
    found = [*find_numbers(text)] if len(text) <= 200 else []
    return found[0].value if len(found) == 1 else None


def _find_fractions(text: str, start: int, stop: int) -> Iterator[Number]:
    for match in _FRACTION.finditer(text, start, stop):
        below = float(match["below"])
        if below:
            value = float(match["over"]) / below
            yield Number(-value if match["sign"] else value, match.start(), match.end())


def _parse_value(match: re.Match[str]) -> float | None:
    """The value of a match; None where it is beyond all use."""
    if match.end() - match.start() > _MAX_NUMBER_CHARS:
        return None
    value = float(_THOUSANDS_SEPARATOR.sub("", match["digits"]))
    if power := match["power"] or match["exponent"]:
        value *= 10.0 ** int(power) if abs(int(power)) < 300 else math.inf
    elif match["under"]:
        under = float(match["under"])
        value = value / under if under else math.inf
    return (-value if match["sign"] == "-" else value) if math.isfinite(value) else None


def _is_label(text: str, match: re.Match[str]) -> bool:
    """Whether a number counts steps, figures, days of a month or the items of a list."""
    before = text[max(0, match.start() - 14) : match.start("digits")]
    last = before.rstrip(" (#")[-1:]
    if (last.isalpha() or last == ".") and _LABEL_BEFORE.search(before):
        return True
    return bool(
        _LIST_MARKER_END.match(text, match.end())
        and _LIST_ITEM_START.search(before)
        and match["digits"].isdigit()
        and len(match["digits"]) < 3
    )
