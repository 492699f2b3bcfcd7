"""The letters of options in a response: after the words that announce one, in its last sentence, anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from mmrl.benchmarks.extraction import phrases
from mmrl.benchmarks.extraction.options import AnswerOptions
from mmrl.benchmarks.extraction.text import CharSpan

LATEX_WRAPPER: Final = r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|boxed|rm|bf)\s*\{"
"""What LaTeX sets a letter or text in."""
_LABEL_PREFIX: Final = rf"[\s\"'\[<{{$:]*(?:(?:\\[(\[]|{LATEX_WRAPPER})[\s$]*)*"
_OPTION_LABEL: Final = re.compile(
    r"[\s\"'\[<{$:,-]*(?:(?:the|most likely|likely|probably|either)\s+)?"
    rf"(?:(?:option|letter|choice|answer|one|labell?ed|选项|选择?)(?:\s+(?:letter|is))?\s*:?\s*)*{_LABEL_PREFIX}"
    r"(?:\(\s*([A-Za-z])\s*\)|([A-Z])(?=\s*[).:,;\"'\]}=>/\\$。\uff0c\uff1b、]|\s*$|\s*\n"
    r"|\s+(?:-|because|since|as|is|and|or|&|\()|\s*[\u4e00-\u9fff])|([a-z])(?=[.)]?\s*\Z))"
)
_BARE_LABEL: Final = re.compile(r"[\s\"'\[{$:]*([A-Z])[ \t]+(\S[^\n]{0,200})")
_SECOND_LETTER: Final = re.compile(
    r"[\s)\].,]{0,3}\s*(?:and|or|&|/|或|和|与|及)[\s}]*(?:option\s+)?\(?([A-Z])(?![A-Za-z'])"
    r"|[)\]]?(?:\s*,\s*|\s+)\(?([A-Z])\)?(?=\s*(?:[,}\]]|\.?\s*(?:$|\n|</)|(?:,\s*)?(?:and|or)\s+\(?[A-Z]\b))"
)
"""A second letter: what names two options chooses neither."""
_LEADING_LABEL: Final = re.compile(
    r"[\s\"'\[{]*(?:(?i:answer|option|choice)\s*:?\s*)?"
    r"(?:\(\s*([A-Za-z])\s*\)|([A-Z])(?=[).:\]]|\s*$|\s*\n|\s*,)|([a-z])(?=[).]?\s*\Z))"
)
_ANY_LABEL: Final = re.compile(
    r"\(([A-Z])\)|(?<![A-Za-z0-9_(])([A-Z])\)(?=\s|$|[.,])"
    r"|\b(?:[Oo]ption|[Cc]hoice)s?\s+\"?([A-Z])\b|选项?\s*([A-Z])(?![A-Za-z])"
)
_UNCLOSED_BRACKET: Final = re.compile(r"\([^()\n]{0,38}$")
"""A bracket that was opened and not closed: what follows closes it, and is no label."""
_LONE_LETTER: Final = re.compile(
    r"(?<![A-Za-z0-9_(\\])\(?([A-Z])\)?(?=[.,;:!]|\s*$|\s+(?:because|since|it is)\b|\s*(?:选项|项)?是?正确)", re.M
)
_CORRECT_AFTER: Final = re.compile(r"\s*(?:选项|项)?是?正确")
_TAKEN_BEFORE: Final = re.compile(
    r"(?:\bleav(?:es|ing)(?: us)?(?: with)?(?: only| just)?"
    r"|\b(?:I|we)(?:'d| would| will)? (?:think|believe|say|answer)(?: that)?(?: (?:it|this|that)(?: is|'s))?"
    r"|\bguess(?: is| would be)?:?)"
    r"(?: (?:most likely|likely|probably))?(?: the)?(?: option| choice| letter)? ?$",
    re.IGNORECASE,
)
_LAST_SENTENCE_LETTER: Final = re.compile(
    r"[\W_]*(?:(?:text|mathrm|mathbf)\w*\s*\{)?"
    rf"(?i:(?:(?:and|but)\s+)?{phrases.CONCLUSION_WORD}?[,:]?\s*(?:(?:it|this|that)\s*(?:is|'s|must be|should be|has to be)\s+)?"
    r"(?:option|choice)?)\s*[(\[]?([A-Z])[)\]]?(?:\s+it is)?[.!]?[\W_]*\Z"
)
_CONCLUDING_LETTER: Final = re.compile(
    rf"[,;] (?i:(?:and )?{phrases.CONCLUSION_WORD},? (?:it is |option )?)\(?([A-Z])\)?(?: it is)?[.!]?\s*\Z"
)


class ChosenOption(NamedTuple):
    """The place of an option and where the response names it."""

    option_index: int
    rule: str
    start: int
    end: int


def label_at(text: str, position: int, options: AnswerOptions) -> ChosenOption | None:
    """The letter that the words from `at` on give; none where they give two."""
    match = _OPTION_LABEL.match(text, position)
    letter = match and match[match.lastindex or 0]
    if match is None or letter is None:
        bare = _BARE_LABEL.match(text, position)
        place = options.index_of_letter(bare[1]) if bare else None
        if bare is None or place is None:
            return None
        rest = bare[2].strip(" .\"'")
        own = options.index_of_text(rest) == place or (bare[1] != "A" and not rest[:1].islower())
        return ChosenOption(place, "announced_letter", bare.start(1), bare.end(1)) if own else None
    place, (start, end) = options.index_of_letter(letter), match.span(match.lastindex or 0)
    if place is None or second_letter(text, letter, match.end()):
        return None
    return ChosenOption(place, "announced_letter", start, end)


def second_letter(text: str, letter: str, end: int) -> str | None:
    """The other letter that is named beside the one that ends there."""
    another = _SECOND_LETTER.match(text, end)
    other = (another[1] or another[2]) if another else None
    return None if other == letter else other


def leading_label(text: str) -> tuple[str, int] | None:
    """The letter that a text begins with, and where it ends."""
    match = _LEADING_LABEL.match(text)
    return (next(filter(None, match.groups())), match.end()) if match else None


def taken_letter(text: str, options: AnswerOptions) -> ChosenOption | None:
    """The last letter that the response says it takes, or is left with."""
    for match in reversed([*_LONE_LETTER.finditer(text)]):
        place = options.index_of_letter(match[1])
        said = _CORRECT_AFTER.match(text, match.end()) or _TAKEN_BEFORE.search(
            text, max(0, match.start() - 60), match.start()
        )
        if place is not None and said:
            return ChosenOption(place, "taken_letter", match.start(1), match.end(1))
    return None


def last_letter(text: str, sentence_span: CharSpan, options: AnswerOptions) -> ChosenOption | None:
    """The letter that the last sentence is all of, or ends with: "B", "Therefore, B.", ".., so B it is."."""
    match = (
        _LAST_SENTENCE_LETTER.match(text, sentence_span.start, sentence_span.end)
        if sentence_span.end - sentence_span.start < 60
        else None
    )
    match = match or _CONCLUDING_LETTER.search(
        text, max(sentence_span.start, sentence_span.end - 40), sentence_span.end
    )
    place = options.index_of_letter(match[1]) if match else None
    return None if match is None or place is None else ChosenOption(place, "last_letter", match.start(1), match.end(1))


def find_labels(text: str, options: AnswerOptions) -> Iterator[ChosenOption]:
    """Every letter that is plainly that of an option, and is not said to be none of the answer."""
    for match in _ANY_LABEL.finditer(text):
        letter = next(filter(None, match.groups()))
        if match[2] and _UNCLOSED_BRACKET.search(text, max(0, match.start() - 40), match.start()):
            continue
        if phrases.ELIMINATED_BEFORE.search(text, max(0, match.start() - 60), match.start()):
            continue
        for one in filter(None, (letter, second_letter(text, letter, match.end()))):
            if (place := options.index_of_letter(one)) is not None:
                yield ChosenOption(place, "letter", match.start(), match.end())


def listed_letters(text: str) -> set[str]:
    """The letters with which lines of a text begin."""
    return {found[0] for line in text.splitlines()[:40] if (found := leading_label(line))}


def blank_out_listing(text: str, options: AnswerOptions) -> str:
    """The same text, as long, the lines of a list of options blank; all options told in a row are such a list."""
    if len(listed_letters(text)) < 2:
        return _blank_out_row(text, options)
    return "".join(" " * len(line) if _LEADING_LABEL.match(line) else line for line in text.splitlines(keepends=True))


def _blank_out_row(text: str, options: AnswerOptions) -> str:
    """The same text, as long, each option's letter and text blank where they first stand, if all of them do."""
    told = [f"{letter}) {written}" for letter, written in zip(options.letters, options.texts, strict=True)]
    if not all(each in text for each in told):
        return text
    for each in told:
        text = text.replace(each, " " * len(each), 1)
    return text
