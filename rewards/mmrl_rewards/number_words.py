"""Numbers in words, such as "one hundred and five" and "a dozen"."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

ONES: Final = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS: Final = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_NOUNS: Final = {"half a dozen": 6, "a pair": 2, "a couple": 2, "a single": 1}
_DIGITS: Final = re.compile(
    r"(?:[0-9]{1,9}|[0-9]{1,3}(?:,[0-9]{3}){1,2}|[1-9][0-9]{0,2}(?: [0-9]{3}){1,2})(?:\.0+)?", re.ASCII
)
_TENS_HYPHEN: Final = re.compile(rf"\b({'|'.join(TENS)})-(?={'|'.join(ONES[1:10])})")
_MAX_WORDS: Final = 12  # of a number


def split_number(phrase: str) -> tuple[int, Sequence[str]] | None:
    """Return the whole number that a phrase in small letters begins with, and the words after it; None without one."""
    words = _TENS_HYPHEN.sub(r"\1 ", phrase).replace("half-dozen", "half a dozen").split()
    # The longest number first: "one hundred and five", not "one".
    for used in range(min(_MAX_WORDS, len(words)), 0, -1):
        number = _read_number(" ".join(words[:used]))
        if number is not None:
            return number, words[used:]
    return None


def _read_number(text: str) -> int | None:
    """Return the number that a text is, in digits or in words, or None."""
    if _DIGITS.fullmatch(text):
        return int(re.sub("[ ,]", "", text.partition(".")[0]))
    if text in _NOUNS:
        return _NOUNS[text]
    number, rest = 0, text
    for word, size in (("million", 1_000_000), ("thousand", 1000)):
        before, found, after = rest.partition(f" {word}")
        if found:
            factor = _read_factor(before)
            if factor is None:
                return None
            number, rest = number + factor * size, after.removeprefix(" and").strip()
    if not number and rest.endswith(" dozen"):
        factor = _read_factor(rest.removesuffix(" dozen"))
        return None if factor is None else 12 * factor
    below_1000 = _below_1000().get(rest) if rest else 0
    return None if below_1000 is None else number + below_1000


def _read_factor(text: str) -> int | None:
    """Return the number before a word such as thousand, or None: "a", up to three digits, or words below 1000."""
    if text.isdecimal() and len(text) < 4:
        return int(text)
    return _below_1000().get("one" if text == "a" else text)


@cache
def _below_1000() -> Mapping[str, int]:
    """Return the numbers below 1000 by their words, without hyphens."""
    below_100 = list(ONES)
    for tens in TENS:
        below_100 += [tens, *(f"{tens} {one}" for one in ONES[1:10])]
    numbers = {word: number for number, word in enumerate(below_100)}
    for hundreds, digit in ((1, "a"), *enumerate(ONES[1:10], 1)):
        numbers[f"{digit} hundred"] = 100 * hundreds
        for number, word in enumerate(below_100[1:], 1):
            numbers[f"{digit} hundred {word}"] = numbers[f"{digit} hundred and {word}"] = 100 * hundreds + number
    return numbers
