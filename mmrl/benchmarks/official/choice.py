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

from mmrl.benchmarks.extraction.extract import Found
from mmrl.benchmarks.extraction.match import right
from mmrl.benchmarks.extraction.text import first_tag
from mmrl.benchmarks.items import Item, Response

_PUNCTUATION: Final = ",.!?;:'"
_BRACKETED: Final = "({})"
_LONG: Final = 5  # words, beyond which the text of an option may count
_PREFIXES: Final = (
    *("The best answer is", "The correct answer is", "The answer is", "The answer", "The best option is"),
    *("The correct option is", "Best answer:", "Best option:"),
)


def letters(count: int) -> list[str]:
    """A, B, .. for so many options."""
    return [chr(ord("A") + place) for place in range(count)]


def right_letter(item: Item) -> str:
    """The letter of the right option; of options that are the same, the first."""
    return letters(len(item.options))[item.options.index(item.answer)]


def mmmu(item: Item, response: Response, found: Found) -> float:
    """MMMU: a letter in brackets, else between spaces, else an option's text; of several the one that comes last."""
    if not item.options:
        return float(_mmmu_open(response.text, item.answer))
    return float(mmmu_letter(response.text, item.options, (_BRACKETED, " {} ")) == right_letter(item))


def mmmu_pro(item: Item, response: Response, found: Found) -> float:
    """MMMU-Pro: the one letter after the last "Answer:", else as MMMU with looser letters."""
    after = response.text.rpartition("Answer:")[2] if "Answer:" in response.text else ""
    named = [letter for letter in letters(len(item.options)) if letter in after.strip()]
    if len(named) == 1:
        return float(named[0] == right_letter(item))
    return float(mmmu_letter(response.text, item.options, (_BRACKETED, "{} ", "{}.")) == right_letter(item))


def mmmu_letter(text: str, options: Sequence[str], forms: Sequence[str]) -> str | None:
    """The letter that MMMU's parser chooses: by the first form that any letter stands in, the last of several.

    Where it tells the last, letters that are not in brackets stand between spaces, in whatever form they were found.
    """
    for mark in _PUNCTUATION:
        text = text.strip(mark)
    text = f" {text} "
    for form in forms:
        if named := [letter for letter in letters(len(options)) if form.format(letter) in text]:
            last = form if form == _BRACKETED else " {} "
            return max(named, key=lambda letter: text.rfind(last.format(letter)))
    lower = text.lower()
    if len(text.split()) > _LONG:
        told = [
            (lower.rfind(option.lower()), -place) for place, option in enumerate(options) if option.lower() in lower
        ]
        if told:
            return letters(len(options))[-max(told)[1]]
    return None


def mvbench(item: Item, response: Response, found: Found) -> float:
    """MVBench: the first word is part of "(a)", or the reverse; so "", "." and "(" are right, as its code has it."""
    said = response.text.lower().split(" ")[0]
    due = f"({right_letter(item).lower()})"
    return float(said.replace(".", "") in due or due in said)


def video_mme(item: Item, response: Response, found: Found) -> float:
    """Video-MME: the first of A, B, C, D once known openings are taken out, even if it begins a word."""
    text = response.text.strip()
    for prefix in _PREFIXES:
        text = text.replace(prefix, "")
    letter = re.search(r"[ABCD]", text)
    return float(letter is not None and letter[0] == right_letter(item))


def seed_bench_r1(item: Item, response: Response, found: Found) -> float:
    """SEED-Bench-R1: the first character in the answer tags."""
    answer = first_tag(response.text)
    return float(answer is not None and answer.strip()[:1].upper() == right_letter(item))


def mathverse(item: Item, response: Response, found: Found) -> float:
    """MathVerse: the extraction is the answer, to the letter."""
    due = right_letter(item) if item.options else str(item.answer)
    return float(found.value == due)


def by_rule(item: Item, response: Response, found: Found) -> float:
    """Geometry3K, whose code grades what stands in a box by mathruler: the letter that the rules find, or the strict
    verdict on a formula.
    """
    return float(found.value == right_letter(item)) if item.options else float(right(item, response, found))


def _mmmu_open(response: str, answer: object) -> bool:
    """MMMU's open questions: a number equal to two decimals, or a text that stands in a key phrase."""
    golds = answer if isinstance(answer, list) else [answer]
    due = [form for gold in golds for form in _forms(str(gold))]
    for said in (form for phrase in _phrases(response) for form in _forms(phrase)):
        if isinstance(said, float) and said in due:
            return True
        if isinstance(said, str) and any(isinstance(form, str) and form in said for form in due):
            return True
    return False


_KEYS: Final = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_FIGURES: Final = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(r"-?(?<!\d)\d{1,60}(?:\.\d{1,60})?[eE][+-]?\d{1,60}"),
    re.compile(r"-?(?:(?<!\d)\d{1,60}\.\d+|\.\d+|(?<!\d)\d{1,60}\b)(?![eE][+-]?\d)(?![,\d])"),
)
_LONGEST: Final = 4000  # characters, beyond which the search for numbers takes too long


def _phrases(response: str) -> list[str]:
    """The shortest tail of each line behind a key word, the numbers in it; the whole response if there is none."""
    text = response[-_LONGEST:].strip().strip(".").lower()
    lines = text.split("\n")
    tails = []
    for place, line in enumerate(lines):
        keys = (*_KEYS, "=") if place == len(lines) - 1 else _KEYS
        ends = [line.rpartition(key)[2].strip() for key in keys if key in line]
        shortest = min(filter(None, ends), key=len, default="")
        if shortest and shortest not in _PUNCTUATION:
            tails.append(shortest)
    phrases = tails or [text]
    return [*phrases, *(number for phrase in phrases for pattern in _FIGURES for number in pattern.findall(phrase))]


def _forms(text: str) -> list[str | float]:
    """A number to two decimals, or the text in lower case; single letters with a space on one side."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        lower = text.lower()
        return [f" {lower}", f"{lower} "] if len(lower) == 1 else [lower]
