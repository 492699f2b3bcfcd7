"""Numbers in words, such as "one hundred and five", "2.5 million" and "a dozen"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

ONES: Final = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS: Final = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_NOUNS: Final[dict[str, Fraction | int]] = {
    **{"a pair": 2, "a couple": 2, "a single": 1},
    **dict.fromkeys(("half", "half a", "half an"), Fraction(1, 2)),
}
_PARTS: Final = {
    **{"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6},
    **{"seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10},
}
SCALES: Final = {"trillion": 10**12, "billion": 10**9, "million": 10**6, "thousand": 1000, "hundred": 100, "dozen": 12}
_SCALED: Final = {size: re.compile(rf"(.+?)[ -]{word}s?(?: (?:and )?(.+))?") for word, size in SCALES.items()}
BELOW_100: Final = {word: number for number, word in enumerate(ONES)} | {
    f"{tens} {one}" if ones else tens: 10 * number + ones
    for number, tens in enumerate(TENS, 2)
    for ones, one in enumerate(("", *ONES[1:10]))
}
_DIGITS: Final = re.compile(
    r"(?:[0-9]{1,9}|[0-9]{1,3}(?:,[0-9]{3}){1,2}|[1-9][0-9]{0,2}(?: [0-9]{3}){1,2})(?:\.0+)?", re.ASCII
)
_FACTOR: Final = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,9})?", re.ASCII)
_TENS_HYPHEN: Final = re.compile(rf"\b({'|'.join(TENS)})-(?={'|'.join(ONES[1:10])})")
_MAX_WORDS: Final = 12  # of a number
_SHARE: Final = re.compile(rf"(?:(.+) and )?(an?|{'|'.join(ONES[1:])})[ -](halve|{'|'.join(_PARTS)})(s?)")  # two thirds
# 12 500, 12{,}500 and 3.141 592
GROUPED_DIGITS: Final = re.compile(
    r"(?<![0-9.,])[1-9][0-9]{0,2}(?:(?: |\{,\})[0-9]{3})+(?![0-9])|\.[0-9]{3}(?: [0-9]{3})* [0-9]{1,3}(?![0-9])"
)
MINUS: Final = re.compile(r"(?:minus|negative) ", re.IGNORECASE)
_SUPERSCRIPTS: Final = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b"
_EXPONENT: Final = re.compile(f"[{_SUPERSCRIPTS}]+")
_ON_THE_LINE: Final = str.maketrans(_SUPERSCRIPTS, "0123456789+-")


def join_digits(match: re.Match[str]) -> str:
    """Return a match of `GROUPED_DIGITS` without what separates its groups."""
    return re.sub("[ {},]", "", match[0])


def write_exponents(text: str) -> str:
    """Return a text with 10⁻³ as 10^{-3}."""
    return _EXPONENT.sub(lambda match: f"^{{{match[0].translate(_ON_THE_LINE)}}}", text)


def split_number(phrase: str) -> tuple[float, Sequence[str]] | None:
    """Return the number that a phrase in small letters begins with, and the words after it; None without one.

    It is an int if it is whole: 12 for "a dozen eggs", and 1.5 for "one and a half hours".
    """
    words = _TENS_HYPHEN.sub(r"\1 ", phrase).split()
    # The longest number first: "one hundred and five", not "one".
    for used in range(min(_MAX_WORDS, len(words)), 0, -1):
        number = _read_number(" ".join(words[:used]))
        if number is not None:
            return int(number) if number == int(number) else float(number), words[used:]
    return None


def _read_number(text: str) -> Fraction | int | None:
    """Return the number that a text is, in digits or in words, or None."""
    if _DIGITS.fullmatch(text):
        return int(re.sub("[ ,]", "", text.partition(".")[0]))
    if text in _NOUNS:
        return _NOUNS[text]
    share = _SHARE.fullmatch(text)
    if share:
        whole, count = _read_number(share[1]) if share[1] else 0, BELOW_100.get(share[2], 1)
        agrees = (count > 1) == bool(share[4])
        return whole + Fraction(count, _PARTS.get(share[3], 2)) if agrees and whole is not None else None
    number, rest = Fraction(0), text
    for size, pattern in _SCALED.items():
        scaled = pattern.fullmatch(rest)
        if scaled:
            factor = _read_factor(scaled[1])
            if factor is None:
                return None
            number, rest = number + factor * size, scaled[2] or ""
    last = BELOW_100.get(rest) if rest else 0
    return None if last is None else number + last


def _read_factor(text: str) -> Fraction | int | None:
    """Return the number before a word such as thousand, or None: "a", up to three digits, or words below 1000."""
    if _FACTOR.fullmatch(text):
        return Fraction(text)
    factor = 1 if text == "a" else _read_number(text)
    return factor if factor is not None and factor < 1000 else None
