"""The letters of options in a response: after the words that announce one, in its last sentence, anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from mmrl.benchmarks.extraction import phrases
from mmrl.benchmarks.extraction.options import Options
from mmrl.benchmarks.extraction.text import Span

DRESS: Final = r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|boxed|rm|bf)\s*\{"
"""What LaTeX sets a letter or text in."""
_OPENING: Final = rf"[\s\"'\[<{{$:]*(?:(?:\\[(\[]|{DRESS})[\s$]*)*"
_LABEL: Final = re.compile(
    r"[\s\"'\[<{$:,-]*(?:(?:the|most likely|likely|probably|either)\s+)?"
    rf"(?:(?:option|letter|choice|answer|one|labell?ed|选项|选择?)(?:\s+(?:letter|is))?\s*:?\s*)*{_OPENING}"
    r"(?:\(\s*([A-Za-z])\s*\)|([A-Z])(?=\s*[).:,;\"'\]}=>/\\$。\uff0c\uff1b、]|\s*$|\s*\n"
    r"|\s+(?:-|because|since|as|is|and|or|&|\()|\s*[\u4e00-\u9fff])|([a-z])(?=[.)]?\s*\Z))"
)
_BARE_LABEL: Final = re.compile(r"[\s\"'\[{$:]*([A-Z])[ \t]+(\S[^\n]{0,200})")
_ANOTHER: Final = re.compile(
    r"[\s)\].,]{0,3}\s*(?:and|or|&|/|或|和|与|及)[\s}]*(?:option\s+)?\(?([A-Z])(?![A-Za-z'])"
    r"|[)\]]?(?:\s*,\s*|\s+)\(?([A-Z])\)?(?=\s*(?:[,}\]]|\.?\s*(?:$|\n|</)|(?:,\s*)?(?:and|or)\s+\(?[A-Z]\b))"
)
"""A second letter: what names two options chooses neither."""
_FIRST: Final = re.compile(
    r"[\s\"'\[{]*(?:(?i:answer|option|choice)\s*:?\s*)?"
    r"(?:\(\s*([A-Za-z])\s*\)|([A-Z])(?=[).:\]]|\s*$|\s*\n|\s*,)|([a-z])(?=[).]?\s*\Z))"
)
_LABELS: Final = re.compile(
    r"\(([A-Z])\)|(?<![A-Za-z0-9_(])([A-Z])\)(?=\s|$|[.,])"
    r"|\b(?:[Oo]ption|[Cc]hoice)s?\s+\"?([A-Z])\b|选项?\s*([A-Z])(?![A-Za-z])"
)
_ENUMERATED: Final = re.compile(r"\([^()\n]{0,38}$")
"""A bracket that was opened and not closed: what follows closes it, and is no label."""
_ALONE: Final = re.compile(
    r"(?<![A-Za-z0-9_(\\])\(?([A-Z])\)?(?=[.,;:!]|\s*$|\s+(?:because|since|it is)\b|\s*(?:选项|项)?是?正确)", re.M
)
_SUITS: Final = re.compile(r"\s*(?:选项|项)?是?正确")
_TAKEN: Final = re.compile(
    r"(?:\bleav(?:es|ing)(?: us)?(?: with)?(?: only| just)?"
    r"|\b(?:I|we)(?:'d| would| will)? (?:think|believe|say|answer)(?: that)?(?: (?:it|this|that)(?: is|'s))?"
    r"|\bguess(?: is| would be)?:?)"
    r"(?: (?:most likely|likely|probably))?(?: the)?(?: option| choice| letter)? ?$",
    re.IGNORECASE,
)
_LAST: Final = re.compile(
    r"[\W_]*(?:(?:text|mathrm|mathbf)\w*\s*\{)?"
    rf"(?i:(?:(?:and|but)\s+)?{phrases.SO}?[,:]?\s*(?:(?:it|this|that)\s*(?:is|'s|must be|should be|has to be)\s+)?"
    r"(?:option|choice)?)\s*[(\[]?([A-Z])[)\]]?(?:\s+it is)?[.!]?[\W_]*\Z"
)
_SO_LAST: Final = re.compile(
    rf"[,;] (?i:(?:and )?{phrases.SO},? (?:it is |option )?)\(?([A-Z])\)?(?: it is)?[.!]?\s*\Z"
)


class Choice(NamedTuple):
    """The place of an option and where the response names it."""

    place: int
    rule: str
    start: int
    end: int


def label(text: str, at: int, options: Options) -> Choice | None:
    """The letter that the words from `at` on give; none where they give two."""
    match = _LABEL.match(text, at)
    letter = match and match[match.lastindex or 0]
    if match is None or letter is None:
        bare = _BARE_LABEL.match(text, at)
        place = options.place(bare[1]) if bare else None
        if bare is None or place is None:
            return None
        rest = bare[2].strip(" .\"'")
        own = options.spelled(rest) == place or (bare[1] != "A" and not rest[:1].islower())
        return Choice(place, "announced_letter", bare.start(1), bare.end(1)) if own else None
    place, (start, end) = options.place(letter), match.span(match.lastindex or 0)
    if place is None or several(text, letter, match.end()):
        return None
    return Choice(place, "announced_letter", start, end)


def several(text: str, letter: str, end: int) -> str | None:
    """The other letter that is named beside the one that ends there."""
    another = _ANOTHER.match(text, end)
    other = (another[1] or another[2]) if another else None
    return None if other == letter else other


def first_label(text: str) -> tuple[str, int] | None:
    """The letter that a text begins with, and where it ends."""
    match = _FIRST.match(text)
    return (next(filter(None, match.groups())), match.end()) if match else None


def taken(text: str, options: Options) -> Choice | None:
    """The last letter that the response says it takes, or is left with."""
    for match in reversed([*_ALONE.finditer(text)]):
        place = options.place(match[1])
        said = _SUITS.match(text, match.end()) or _TAKEN.search(text, max(0, match.start() - 60), match.start())
        if place is not None and said:
            return Choice(place, "taken_letter", match.start(1), match.end(1))
    return None


def last(text: str, part: Span, options: Options) -> Choice | None:
    """The letter that the last sentence is all of, or ends with: "B", "Therefore, B.", ".., so B it is."."""
    match = _LAST.match(text, part.start, part.end) if part.end - part.start < 60 else None
    match = match or _SO_LAST.search(text, max(part.start, part.end - 40), part.end)
    place = options.place(match[1]) if match else None
    return None if match is None or place is None else Choice(place, "last_letter", match.start(1), match.end(1))


def labelled(text: str, options: Options) -> Iterator[Choice]:
    """Every letter that is plainly that of an option, and is not said to be none of the answer."""
    for match in _LABELS.finditer(text):
        letter = next(filter(None, match.groups()))
        if match[2] and _ENUMERATED.search(text, max(0, match.start() - 40), match.start()):
            continue
        if phrases.DISMISSED.search(text, max(0, match.start() - 60), match.start()):
            continue
        for one in filter(None, (letter, several(text, letter, match.end()))):
            if (place := options.place(one)) is not None:
                yield Choice(place, "letter", match.start(), match.end())


def listing(text: str) -> set[str]:
    """The letters with which lines of a text begin."""
    return {found[0] for line in text.splitlines()[:40] if (found := first_label(line))}


def without_listing(text: str, options: Options) -> str:
    """The same text, as long, the lines of a list of options blank; all options told in a row are such a list."""
    if len(listing(text)) < 2:
        return _without_row(text, options)
    return "".join(" " * len(line) if _FIRST.match(line) else line for line in text.splitlines(keepends=True))


def _without_row(text: str, options: Options) -> str:
    """The same text, as long, each option's letter and text blank where they first stand, if all of them do."""
    told = [f"{letter}) {written}" for letter, written in zip(options.letters, options.texts, strict=True)]
    if not all(each in text for each in told):
        return text
    for each in told:
        text = text.replace(each, " " * len(each), 1)
    return text
