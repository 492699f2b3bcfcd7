"""Options of a question, prepared once, and the ways in which a response may name one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from string import ascii_uppercase
from types import MappingProxyType
from typing import Final, NamedTuple

from mmrl.answer.language import ARTICLES, REASONS, WRONG
from mmrl.benchmarks.extraction import phrases
from mmrl.benchmarks.extraction.numbers import parse_single_number

# Any other command is left out.
_LATEX_REPLACEMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {"\\circ": "°", "\\pi": "π", "\\cdot": "·", "\\angle": "∠", "\\triangle": "△"}
)
_LATEX_COMMAND: Final = re.compile(
    r"\\(?:left|right|circ|pi|cdot|angle|triangle|mathrm|text|displaystyle)(?![a-z])|\\[,;!: ]"
)
_LATEX_FRACTION: Final = re.compile(r"\\[dt]?frac\s*\{([^{}]{1,40})\}\s*\{([^{}]{1,40})\}")
_SQUARE_ROOT: Final = re.compile(r"(?:\\sqrt|√)\s*(?:\{([^{}]{1,40})\}|\(([^()]{1,40})\)|(\w))")
_IGNORED_CHARS: Final = re.compile(r"[\s${}()\[\]\"'`*,]|\.(?!\d)|\\")
_DEGREES: Final = re.compile(r"°|\^o\b|\^°|degrees?\b")
_ARTICLE: Final = re.compile(rf"^(?:{ARTICLES})\s+", re.IGNORECASE)
_WORD: Final = re.compile(r"[a-z]{3,}|\d+(?:\.\d+)?")
_WORD_ENDING: Final = re.compile(r"(?<=[a-z]{3})(?:ing|ed|es|e|s|d)$")
_SYNONYM_STEMS: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(("declin", "drop", "reduc", "fall", "lessen", "diminish", "shrink"), "decreas")
    | dict.fromkeys(("ris", "grow", "expand"), "increas")
    | dict.fromkeys(("unchang", "constant", "stabl"), "sam")
)
_STOP_WORDS: Final = frozenset(
    {
        *("the", "and", "are", "was", "has", "have", "this", "that", "there", "with"),
        *("than", "for", "from", "its", "can", "could", "would", "will", "all", "may"),
    }
)
_RELATIVE_TOLERANCE: Final = 1e-9
_YES_WORDS: Final = frozenset({"yes", "true", "correct", "right", "是", "对", "正确"})
_NO_WORDS: Final = frozenset({"no", "not", *WRONG.split("|"), "否", "不是", "错", "错误"})


class ChosenOption(NamedTuple):
    """An option that a response names."""

    option_index: int  # 0 is A
    rule: str  # name of the rule that found it
    start: int  # first character of the words that name it
    end: int  # character after them


class AnswerOptions:
    """The options of a question. Indices count from 0, which is A."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Prepare the options of these texts."""
        self.texts = tuple(texts)
        self.letters = tuple(ascii_uppercase[: len(self.texts)])
        self._normalized_texts = tuple(map(normalize_option, self.texts))
        self._numbers = tuple(map(parse_single_number, self.texts))
        self.all_numeric = None not in self._numbers
        # If one option says that the answer is unknown, a refusal is an answer.
        self.has_refusal_option = any(map(phrases.find_refusal, self.texts))

    def index_of_letter(self, letter: str) -> int | None:
        """Return the index of a letter of either case; None for a letter beyond the last option."""
        index = ord(letter.upper()) - ord("A")
        return index if 0 <= index < len(self.texts) else None

    def index_of_text(self, text: str) -> int | None:
        """Return the index of the option with this text, the first of equal ones; None if there is none."""
        normalized = normalize_option(text)
        if not normalized:
            return None
        if normalized in self._normalized_texts:
            return self._normalized_texts.index(normalized)
        # "145" is "145°" where only one option is.
        without_degrees = normalized.rstrip("°")
        if not without_degrees:
            return None
        candidates = [option.rstrip("°") for option in self._normalized_texts]
        return candidates.index(without_degrees) if candidates.count(without_degrees) == 1 else None

    def index_of_number(self, value: float) -> int | None:
        """Return the index of the only option with this number, whatever its unit."""
        tolerance = _RELATIVE_TOLERANCE * abs(value)
        numbers = enumerate(self._numbers)
        indices = [index for index, number in numbers if number is not None and abs(number - value) <= tolerance]
        # Options of one text count as one.
        is_single = len({self._normalized_texts[index] for index in indices}) == 1
        return indices[0] if is_single else None

    def index_by_distinctive_words(self, sentence: str) -> int | None:
        """Return the index of the one option whose distinctive words all occur in a sentence."""
        said, stems = word_stems(sentence), self._distinctive_stems
        hits = [index for index, option_stems in enumerate(stems) if option_stems and option_stems <= said]
        if not hits:
            return None
        # Of several, the one whose words include the words of all others.
        best = max(hits, key=lambda index: len(stems[index]))
        return best if all(stems[index] < stems[best] for index in hits if index != best) else None

    def find_mentions(self, text: str, start: int, end: int) -> Iterator[ChosenOption]:
        """Yield the places of option texts in reading order; at one place, the longest."""
        if self._pattern is None:
            return
        for match in self._pattern.finditer(text, start, end):
            # A mention may be in the singular or plural of the option.
            for form in (match[0], f"{match[0]}s", match[0].removesuffix("s"), match[0].removesuffix("es")):
                index = self.index_of_text(form)
                if index is not None:
                    yield ChosenOption(index, "mention", match.start(), match.end())
                    break

    @cached_property
    def yes_no_indices(self) -> tuple[int, int] | None:
        """Indices of yes and no, where each is one of the options."""
        yes = [index for index, text in enumerate(self._normalized_texts) if text in _YES_WORDS]
        no = [index for index, text in enumerate(self._normalized_texts) if text in _NO_WORDS]
        return (yes[0], no[0]) if len(yes) == len(no) == 1 else None

    @cached_property
    def _distinctive_stems(self) -> tuple[frozenset[str], ...]:
        """Stems of each option's words, without the stems that every option has."""
        stems = list(map(word_stems, self.texts))
        shared = frozenset.intersection(*stems) if len(stems) > 1 else frozenset()
        return tuple(words - shared for words in stems)

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        """Pattern of any option's text as whole words, the longest first."""
        # The longest first, since the first alternative that fits is taken.
        texts = sorted({*map(str.strip, self.texts)} - {""}, key=len, reverse=True)
        return re.compile("|".join(map(_whole_word_pattern, texts)), re.IGNORECASE) if texts else None


@lru_cache(maxsize=4096)  # many responses answer one question
def prepare_options(texts: tuple[str, ...]) -> AnswerOptions:
    """Return the prepared options of these texts."""
    return AnswerOptions(texts)


def normalize_option(text: str) -> str:
    r"""Return a text as options are compared: without case, white space, quotes, $, braces and dialects of LaTeX.

    >>> normalize_option(r"\frac { 5 } { 12 }") == normalize_option("5/12")
    True
    """
    text = text.casefold()
    # Plain searches first: most texts need none of the substitutions.
    if "\\" in text:
        text = _LATEX_COMMAND.sub(lambda match: _LATEX_REPLACEMENTS.get(match[0], ""), text)
        text = _LATEX_FRACTION.sub(r"\1/\2", text)
    if "√" in text or "sqrt" in text:
        text = _SQUARE_ROOT.sub(r"√\1\2\3", text)
    if "°" in text or "^o" in text or "degree" in text:
        text = _DEGREES.sub("°", text).replace("^°", "°")
    return _IGNORED_CHARS.sub("", _ARTICLE.sub("", text.strip()))


def word_stems(text: str) -> frozenset[str]:
    """Return the words of a text without their endings, synonyms under one name."""
    stems = (_WORD_ENDING.sub("", word) for word in _WORD.findall(text.lower()))
    return frozenset(_SYNONYM_STEMS.get(stem, stem) for stem in stems) - _STOP_WORDS


def _whole_word_pattern(text: str) -> str:
    """Return a pattern for a text that is not part of a longer word or number."""
    if len(text) == 1 and text.isalpha():
        # A single letter counts in its own case; A, a and I also begin sentences as words.
        article = rf"|[ ]+(?!(?:is|and|or|{REASONS})\b)[a-z]" if text in "AaI" else ""
        return rf"(?<![A-Za-z0-9_'])(?-i:{text})(?![A-Za-z0-9_']{article})"
    plural = "(?:e?s)?" if text[-1].isalpha() and len(text) > 3 else ""
    # The option may be the plural of what the response says, or the reverse.
    words = text.removesuffix("s").split() if plural else text.split()
    body = r"\s+".join(map(re.escape, words)) + plural
    before = r"(?<![A-Za-z0-9_.√/^-])" if text[0].isalnum() else ""
    after = r"(?![A-Za-z0-9_√/^]|\.\d|-\w)" if text[-1].isalnum() else ""
    return before + body + after
