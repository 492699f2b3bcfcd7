"""The options of a question, prepared once: what may stand for each of them in a response."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple

from mmrl.benchmarks.extraction import phrases
from mmrl.benchmarks.extraction.numbers import parse_single_number

_LATEX_REPLACEMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "\\left": "",
        "\\right": "",
        "\\circ": "°",
        "\\pi": "π",
        "\\cdot": "·",
        "\\angle": "∠",
        "\\triangle": "△",
        "\\mathrm": "",
        "\\text": "",
        "\\displaystyle": "",
    }
)
_LATEX_COMMAND: Final = re.compile(
    r"\\(?:left|right|circ|pi|cdot|angle|triangle|mathrm|text|displaystyle)(?![a-z])|\\[,;!: ]"
)
_LATEX_FRACTION: Final = re.compile(r"\\[dt]?frac\s*\{([^{}]{1,40})\}\s*\{([^{}]{1,40})\}")
_SQUARE_ROOT: Final = re.compile(r"(?:\\sqrt|√)\s*(?:\{([^{}]{1,40})\}|\(([^()]{1,40})\)|(\w))")
_IGNORED_CHARS: Final = re.compile(r"[\s${}()\[\]\"'`*,]|\.(?!\d)|\\")
_DEGREES: Final = re.compile(r"°|\^o\b|\^°|degrees?\b")
_ARTICLE: Final = re.compile(r"^(?:an?|the)\s+", re.IGNORECASE)
_WORD: Final = re.compile(r"[a-z]{3,}|\d+(?:\.\d+)?")
_WORD_ENDING: Final = re.compile(r"(?<=[a-z]{3})(?:ing|ed|es|e|s|d)$")
_SYNONYM_STEMS: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(("declin", "drop", "reduc", "fall", "lessen", "diminish", "shrink"), "decreas")
    | dict.fromkeys(("ris", "grow", "expand"), "increas")
    | dict.fromkeys(("unchang", "constant", "stabl"), "sam")
)
_STOP_WORDS: Final = frozenset(
    [
        "the",
        "and",
        "are",
        "was",
        "has",
        "have",
        "this",
        "that",
        "there",
        "with",
        "than",
        "for",
        "from",
        "its",
        "can",
        "could",
        "would",
        "will",
        "all",
        "may",
    ]
)
_YES_WORDS: Final = frozenset({"yes", "true", "correct", "right", "是", "对", "正确"})
_NO_WORDS: Final = frozenset({"no", "false", "incorrect", "wrong", "not", "否", "不是", "错", "错误"})


def normalize_option(text: str) -> str:
    r"""Text as options are compared: case, white space, quotes, $, braces and the dialect of LaTeX aside.

    >>> comparable(r"\frac { 5 } { 12 }") == comparable("5/12")
    True
    """
    text = text.casefold()
    if "\\" in text:
        text = _LATEX_COMMAND.sub(lambda command: _LATEX_REPLACEMENTS.get(command[0], ""), text)
        text = _LATEX_FRACTION.sub(lambda parts: f"{parts[1].strip()}/{parts[2].strip()}", text)
    if "√" in text or "sqrt" in text:
        text = _SQUARE_ROOT.sub(lambda parts: f"√{parts[1] or parts[2] or parts[3]}", text)
    if "°" in text or "^o" in text or "degree" in text:
        text = _DEGREES.sub("°", text).replace("^°", "°")
    return _IGNORED_CHARS.sub("", _ARTICLE.sub("", text.strip()))


class AnswerOptions:
    """Options by their place: 0 is A."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        self.letters = tuple(chr(ord("A") + place) for place in range(len(self.texts)))
        self._normalized_texts = tuple(map(normalize_option, self.texts))
        self._numbers = tuple(map(parse_single_number, self.texts))

    def index_of_letter(self, letter: str) -> int | None:
        """The place of a letter, either case."""
        found = ord(letter.upper()) - ord("A")
        return found if 0 <= found < len(self.texts) else None

    def index_of_text(self, text: str) -> int | None:
        """The option that a text is; None where it is none. Of options that are the same, the first."""
        key = normalize_option(text)
        if not key:
            return None
        if key in self._normalized_texts:
            return self._normalized_texts.index(key)
        bare = key.rstrip("°")
        alike = (
            [place for place, other in enumerate(self._normalized_texts) if other.rstrip("°") == bare] if bare else []
        )
        return alike[0] if len(alike) == 1 else None

    def index_of_number(self, value: float) -> int | None:
        """The one option that is this number, units aside."""
        alike = [
            place
            for place, number in enumerate(self._numbers)
            if number is not None and abs(number - value) <= 1e-9 * abs(value)
        ]
        return alike[0] if alike and len({self._normalized_texts[place] for place in alike}) == 1 else None

    @cached_property
    def has_refusal_option(self) -> bool:
        """Whether one option is that there is no telling."""
        return any(phrases.find_refusal(text) for text in self.texts)

    @cached_property
    def all_numeric(self) -> bool:
        """Whether every option is one number."""
        return all(number is not None for number in self._numbers)

    @cached_property
    def _distinctive_stems(self) -> tuple[frozenset[str], ...]:
        """For each option the stems of its words that not every option has."""
        stems = [word_stems(text) for text in self.texts]
        shared = frozenset.intersection(*stems) if len(stems) > 1 else frozenset()
        return tuple(words - shared for words in stems)

    def index_by_distinctive_words(self, sentence: str) -> int | None:
        """The one option all of whose distinctive words a sentence has; the one with most of them, if they nest."""
        said = word_stems(sentence)
        hits = sorted(
            (place for place, marks in enumerate(self._distinctive_stems) if marks and marks <= said),
            key=lambda place: -len(self._distinctive_stems[place]),
        )
        if not hits or any(not self._distinctive_stems[other] < self._distinctive_stems[hits[0]] for other in hits[1:]):
            return None
        return hits[0]

    @cached_property
    def yes_no_indices(self) -> tuple[int, int] | None:
        """The places of yes and no, where these are the options."""
        yes = [place for place, key in enumerate(self._normalized_texts) if key in _YES_WORDS]
        no = [place for place, key in enumerate(self._normalized_texts) if key in _NO_WORDS]
        return (yes[0], no[0]) if len(yes) == len(no) == 1 else None

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        """Any option's text as whole words, the longest first."""
        texts = sorted({text.strip() for text in self.texts if text.strip()}, key=len, reverse=True)
        return re.compile("|".join(map(_whole_word_pattern, texts)), re.IGNORECASE) if texts else None

    def _index_of_mention(self, mention: str) -> int | None:
        """The option of a mention, in singular or plural."""
        for form in (mention, f"{mention}s", mention.removesuffix("s"), mention.removesuffix("es")):
            if (place := self.index_of_text(form)) is not None:
                return place
        return None

    def find_mentions(self, text: str, start: int, end: int) -> Iterator[OptionMention]:
        """Where option texts stand in a text, in reading order, longer ones first."""
        if self._pattern is None:
            return
        for match in self._pattern.finditer(text, start, end):
            place = self._index_of_mention(match[0])
            if place is not None:
                yield OptionMention(place, match.start(), match.end())


class OptionMention(NamedTuple):
    """An option's text in a response."""

    option_index: int
    start: int
    end: int


@lru_cache(maxsize=4096)
def prepare_options(texts: tuple[str, ...]) -> AnswerOptions:
    """The options of these texts; kept, since many responses answer one question."""
    return AnswerOptions(texts)


def word_stems(text: str) -> frozenset[str]:
    """Words without their endings, some under the name of another that means the same."""
    stems = (_WORD_ENDING.sub("", word) for word in _WORD.findall(text.lower()))
    return frozenset(_SYNONYM_STEMS.get(stem, stem) for stem in stems) - _STOP_WORDS


def _whole_word_pattern(text: str) -> str:
    """A pattern for a text that is no part of a longer word or number; a letter is in its own case, and no article."""
    if len(text) == 1 and text.isalpha():
        article = r"|[ ]+(?!(?:is|and|or|because|since|as)\b)[a-z]" if text in "AaI" else ""
        return rf"(?<![A-Za-z0-9_'])(?-i:{text})(?![A-Za-z0-9_']{article})"
    plural = "(?:e?s)?" if text[-1].isalpha() and len(text) > 3 else ""
    body = r"\s+".join(map(re.escape, text.removesuffix("s").split() if plural else text.split())) + plural
    before = r"(?<![A-Za-z0-9_.√/^-])" if text[0].isalnum() else ""
    after = r"(?![A-Za-z0-9_√/^]|\.\d|-\w)" if text[-1].isalnum() else ""
    return before + body + after
