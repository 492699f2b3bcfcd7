"""Letters of options in a response: after an announcement, in the last sentence, or anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from mmrl.answer.language import CHOICE_NOUNS, LATEX_TEXT, REASONS
from mmrl.benchmarks.extraction import phrases
from mmrl.benchmarks.extraction.options import AnswerOptions, ChosenOption
from mmrl.benchmarks.extraction.text import CharSpan

# LaTeX command around a letter or text, to its opening brace.
LATEX_WRAPPER: Final = rf"\\(?:{LATEX_TEXT}|textit|mbox|boxed|rm|bf)\s*\{{"
# Possessive (*+): a blank fits several places, and a failed match would try all of them, exponentially many for
# "answer answer answer ...".
_LABEL_PREFIX: Final = rf"[\s\"'\[<{{$:]*+(?:(?:\\[(\[]|{LATEX_WRAPPER})[\s$]*+)*+"
_OPTION_LABEL: Final = re.compile(
    r"[\s\"'\[<{$:,-]*+(?:(?:the|most likely|likely|probably|either)\s+)?"
    rf"(?>(?:{CHOICE_NOUNS}|letter|one|labell?ed|选项|选择?)(?:\s+(?:letter|is))?\s*:?\s*)*+{_LABEL_PREFIX}"
    r"(?:\(\s*([A-Za-z])\s*\)|([A-Z])(?=\s*[).:,;\"'\]}=>/\\$。\uff0c\uff1b、]|\s*$|\s*\n"
    rf"|\s+(?:-|{REASONS}|is|and|or|&|\()|\s*[\u4e00-\u9fff])|([a-z])(?=[.)]?\s*\Z))"
)
_BARE_LABEL: Final = re.compile(r"[\s\"'\[{$:]*([A-Z])[ \t]+(\S[^\n]{0,200})")
# A second letter after the first; a response that names two options chooses neither.
_SECOND_LETTER: Final = re.compile(
    r"[\s)\].,]{0,3}\s*(?:and|or|&|/|或|和|与|及)[\s}]*(?:option\s+)?\(?([A-Z])(?![A-Za-z'])"
    r"|[)\]]?(?:\s*,\s*|\s+)\(?([A-Z])\)?(?=\s*(?:[,}\]]|\.?\s*(?:$|\n|</)|(?:,\s*)?(?:and|or)\s+\(?[A-Z]\b))"
)
_LEADING_LABEL: Final = re.compile(
    rf"[\s\"'\[{{]*+(?:(?i:{CHOICE_NOUNS})\s*+:?\s*+)?"
    r"(?:\(\s*([A-Za-z])\s*\)|([A-Z])(?=[).:\]]|\s*$|\s*\n|\s*,)|([a-z])(?=[).]?\s*\Z))"
)
_ANY_LABEL: Final = re.compile(
    r"\(([A-Z])\)|(?<![A-Za-z0-9_(])([A-Z])\)(?=\s|$|[.,])"
    r"|\b(?:[Oo]ption|[Cc]hoice)s?\s+\"?([A-Z])\b|选项?\s*([A-Z])(?![A-Za-z])"
)
# A bracket opened before a letter: the bracket after the letter closes it, so the letter is not a label.
_UNCLOSED_BRACKET: Final = re.compile(r"\([^()\n]{0,38}$")
_ELIMINATION_WINDOW: Final = 60  # characters before a letter in which "eliminate" excludes it
_MAX_LETTER_SENTENCE_CHARS: Final = 60  # characters of the longest last sentence that may be nothing but a letter
_CONCLUDING_WINDOW: Final = 40  # characters at the end of a sentence that may name a letter after a comma
_MAX_LISTED_LINES: Final = 40  # lines at the start of a response that may list options
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
    rf"(?i:(?:(?:and|but)\s+)?{phrases.CONCLUSION_WORD}?[,:]?\s*"
    r"(?:(?:it|this|that)\s*(?:is|'s|must be|should be|has to be)\s+)?"
    r"(?:option|choice)?)\s*[(\[]?([A-Z])[)\]]?(?:\s+it is)?[.!]?[\W_]*\Z"
)
_CONCLUDING_LETTER: Final = re.compile(
    rf"[,;] (?i:(?:and )?{phrases.CONCLUSION_WORD},? (?:it is |option )?)\(?([A-Z])\)?(?: it is)?[.!]?\s*\Z"
)


def label_at(text: str, position: int, options: AnswerOptions) -> ChosenOption | None:
    """Return the option whose letter is at a position; None if the text names a second letter there."""
    match = _OPTION_LABEL.match(text, position)
    if match is None:
        # No sign follows the letter; the text of its option may.
        return _bare_label_at(text, position, options)
    group = match.lastindex or 0
    is_one = not second_letter(text, match[group], match.end())
    return _choose(options, match, "announced_letter", group) if is_one else None


def second_letter(text: str, letter: str, end: int) -> str | None:
    """Return the letter that is named next to the one that ends at `end`, if it is a different one."""
    match = _SECOND_LETTER.match(text, end)
    second = (match[1] or match[2]) if match else None
    return None if second == letter else second


def leading_label(text: str) -> tuple[str, int] | None:
    """Return the letter that a text begins with, and the place after it."""
    match = _LEADING_LABEL.match(text)
    return (next(filter(None, match.groups())), match.end()) if match else None


def taken_letter(text: str, options: AnswerOptions) -> ChosenOption | None:
    """Return the last letter that the response calls correct, believes, or is left with."""
    for match in reversed(list(_LONE_LETTER.finditer(text))):
        window_start = max(0, match.start() - _ELIMINATION_WINDOW)
        is_taken = _CORRECT_AFTER.match(text, match.end()) or _TAKEN_BEFORE.search(text, window_start, match.start())
        chosen = _choose(options, match, "taken_letter") if is_taken else None
        if chosen:
            return chosen
    return None


def last_letter(text: str, sentence: CharSpan, options: AnswerOptions) -> ChosenOption | None:
    """Return the letter that the last sentence consists of or ends with: "B", "Therefore, B.", ".., so B it is."."""
    match = None
    if sentence.end - sentence.start < _MAX_LETTER_SENTENCE_CHARS:
        match = _LAST_SENTENCE_LETTER.match(text, sentence.start, sentence.end)
    if match is None:
        # No match at its start: the letter may still follow a comma at the end.
        window_start = max(sentence.start, sentence.end - _CONCLUDING_WINDOW)
        match = _CONCLUDING_LETTER.search(text, window_start, sentence.end)
    return _choose(options, match, "last_letter")


def find_labels(text: str, options: AnswerOptions) -> Iterator[ChosenOption]:
    """Yield every letter that plainly names an option, unless the response eliminates that option."""
    for match in _ANY_LABEL.finditer(text):
        letter = next(filter(None, match.groups()))
        if match[2] and _UNCLOSED_BRACKET.search(text, max(0, match.start() - 40), match.start()):
            continue
        window_start = max(0, match.start() - _ELIMINATION_WINDOW)
        if phrases.ELIMINATED_BEFORE.search(text, window_start, match.start()):
            continue
        # With "A and B" both are yielded; callers then find that the letters disagree.
        for named in (letter, second_letter(text, letter, match.end())):
            option_index = options.index_of_letter(named) if named else None
            if option_index is not None:
                yield ChosenOption(option_index, "letter", match.start(), match.end())


def listed_letters(text: str) -> set[str]:
    """Return the letters that lines of a text begin with."""
    labels = filter(None, map(leading_label, text.splitlines()[:_MAX_LISTED_LINES]))
    return {letter for letter, _ in labels}


def blank_out_listing(text: str, options: AnswerOptions) -> str:
    """Return a text of the same length without its list of options, on lines or in a row."""
    if len(listed_letters(text)) >= 2:
        # Blanks of the same length, so that places stay.
        lines = text.splitlines(keepends=True)
        return "".join(" " * len(line) if _LEADING_LABEL.match(line) else line for line in lines)
    # A row is "A) text", "B) text", ...; it counts only if it has every option.
    row = [f"{letter}) {option}" for letter, option in zip(options.letters, options.texts, strict=True)]
    if all(entry in text for entry in row):
        for entry in row:
            text = text.replace(entry, " " * len(entry), 1)
    return text


def _bare_label_at(text: str, position: int, options: AnswerOptions) -> ChosenOption | None:
    """Return the option of a letter that is followed by its text, such as "B 5"."""
    match = _BARE_LABEL.match(text, position)
    chosen = _choose(options, match, "announced_letter")
    if match is None or chosen is None:
        return None
    rest = match[2].strip(" .\"'")
    # An A followed by other words in lower case is an article.
    is_label = options.index_of_text(rest) == chosen.option_index or (match[1] != "A" and not rest[:1].islower())
    return chosen if is_label else None


def _choose(options: AnswerOptions, match: re.Match[str] | None, rule: str, group: int = 1) -> ChosenOption | None:
    """Return the option of the letter in a group of a match; None without a match, or beyond the last option."""
    option_index = options.index_of_letter(match[group]) if match else None
    return None if match is None or option_index is None else ChosenOption(option_index, rule, *match.span(group))
