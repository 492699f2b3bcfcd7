"""How multiple-choice benchmarks read a letter: MMMU and MMMU-Pro, MVBench, Video-MME, SEED-Bench-R1, MathVerse.

Sources: eval/eval_utils.py and mmmu-pro/evaluate.py of github.com/MMMU-Benchmark/MMMU (arXiv:2311.16502, 2409.02813);
mvbench of github.com/OpenGVLab/Ask-Anything (arXiv:2311.17005); eval_your_results.py of Video-MME (arXiv:2405.21075);
SEED-Bench-R1 (arXiv:2503.24376); evaluation/score_answer_s2.py of MathVerse (arXiv:2403.14624). Departures: where MMMU
draws a letter at random, nothing is chosen; where MathVerse asks a judge, its `--quick_match` decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from mmrl.benchmarks.extraction.extract import Extraction
from mmrl.benchmarks.extraction.match import is_correct
from mmrl.benchmarks.extraction.text import first_answer_tag
from mmrl.benchmarks.items import Item, ItemResponse

_PUNCTUATION: Final = ",.!?;:'"
_BRACKETED_LETTER: Final = "({})"
_MIN_WORDS_FOR_TEXT: Final = 5  # words, beyond which the text of an option may count
_ANSWER_PREFIXES: Final = (
    *("The best answer is", "The correct answer is", "The answer is", "The answer", "The best option is"),
    *("The correct option is", "Best answer:", "Best option:"),
)


def option_letters(count: int) -> list[str]:
    """A, B, .. for so many options."""
    return [chr(ord("A") + place) for place in range(count)]


def correct_letter(item: Item) -> str:
    """The letter of the right option; of options that are the same, the first."""
    return option_letters(len(item.options))[item.options.index(item.answer)]


def score_mmmu(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """MMMU: a letter in brackets, else between spaces, else an option's text; of several the one that comes last."""
    if not item.options:
        return float(_is_mmmu_open_correct(response.text, item.answer))
    return float(parse_mmmu_letter(response.text, item.options, (_BRACKETED_LETTER, " {} ")) == correct_letter(item))


def score_mmmu_pro(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """MMMU-Pro: the one letter after the last "Answer:", else as MMMU with looser letters."""
    after = response.text.rpartition("Answer:")[2] if "Answer:" in response.text else ""
    named = [letter for letter in option_letters(len(item.options)) if letter in after.strip()]
    if len(named) == 1:
        return float(named[0] == correct_letter(item))
    return float(
        parse_mmmu_letter(response.text, item.options, (_BRACKETED_LETTER, "{} ", "{}.")) == correct_letter(item)
    )


def parse_mmmu_letter(text: str, options: Sequence[str], forms: Sequence[str]) -> str | None:
    """The letter that MMMU's parser chooses: by the first form that any letter stands in, the last of several.

    Where it tells the last, letters that are not in brackets stand between spaces, in whatever form they were found.
    """
    for mark in _PUNCTUATION:
        text = text.strip(mark)
    text = f" {text} "
    for form in forms:
        if named := [letter for letter in option_letters(len(options)) if form.format(letter) in text]:
            last = form if form == _BRACKETED_LETTER else " {} "
            return max(named, key=lambda letter: text.rfind(last.format(letter)))
    lower = text.lower()
    if len(text.split()) > _MIN_WORDS_FOR_TEXT:
        told = [
            (lower.rfind(option.lower()), -place) for place, option in enumerate(options) if option.lower() in lower
        ]
        if told:
            return option_letters(len(options))[-max(told)[1]]
    return None


def score_mvbench(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """MVBench: the first word is part of "(a)", or the reverse; so "", "." and "(" are right, as its code has it."""
    said = response.text.lower().split(" ")[0]
    due = f"({correct_letter(item).lower()})"
    return float(said.replace(".", "") in due or due in said)


def score_video_mme(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Video-MME: the first of A, B, C, D once known openings are taken out, even if it begins a word."""
    text = response.text.strip()
    for prefix in _ANSWER_PREFIXES:
        text = text.replace(prefix, "")
    letter = re.search(r"[ABCD]", text)
    return float(letter is not None and letter[0] == correct_letter(item))


def score_seed_bench_r1(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """SEED-Bench-R1: the first character in the answer tags."""
    answer = first_answer_tag(response.text)
    return float(answer is not None and answer.strip()[:1].upper() == correct_letter(item))


def score_mathverse(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """MathVerse: the extraction is the answer, to the letter."""
    due = correct_letter(item) if item.options else str(item.answer)
    return float(extraction.value == due)


def score_geometry3k(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Geometry3K, whose code grades what stands in a box by mathruler: the letter that the rules find, or the strict
    verdict on a formula.
    """
    return (
        float(extraction.value == correct_letter(item))
        if item.options
        else float(is_correct(item, response, extraction))
    )


def _is_mmmu_open_correct(response: str, answer: object) -> bool:
    """MMMU's open questions: a number equal to two decimals, or a text that stands in a key phrase."""
    golds = answer if isinstance(answer, list) else [answer]
    due = [form for gold in golds for form in _normalized_forms(str(gold))]
    for said in (form for phrase in _key_phrases(response) for form in _normalized_forms(phrase)):
        if isinstance(said, float) and said in due:
            return True
        if isinstance(said, str) and any(isinstance(form, str) and form in said for form in due):
            return True
    return False


_KEY_WORDS: Final = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_NUMBER_PATTERNS: Final = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(r"-?(?<!\d)\d{1,60}(?:\.\d{1,60})?[eE][+-]?\d{1,60}"),
    re.compile(r"-?(?:(?<!\d)\d{1,60}\.\d+|\.\d+|(?<!\d)\d{1,60}\b)(?![eE][+-]?\d)(?![,\d])"),
)
_MAX_CHARS: Final = 4000  # characters, beyond which the search for numbers takes too long


def _key_phrases(response: str) -> list[str]:
    """The shortest tail of each line behind a key word, the numbers in it; the whole response if there is none."""
    text = response[-_MAX_CHARS:].strip().strip(".").lower()
    lines = text.split("\n")
    tails = []
    for place, line in enumerate(lines):
        keys = (*_KEY_WORDS, "=") if place == len(lines) - 1 else _KEY_WORDS
        ends = [line.rpartition(key)[2].strip() for key in keys if key in line]
        shortest = min(filter(None, ends), key=len, default="")
        if shortest and shortest not in _PUNCTUATION:
            tails.append(shortest)
    phrases = tails or [text]
    return [
        *phrases,
        *(number for phrase in phrases for pattern in _NUMBER_PATTERNS for number in pattern.findall(phrase)),
    ]


def _normalized_forms(text: str) -> list[str | float]:
    """A number to two decimals, or the text in lower case; single letters with a space on one side."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        lower = text.lower()
        return [f" {lower}", f"{lower} "] if len(lower) == 1 else [lower]
