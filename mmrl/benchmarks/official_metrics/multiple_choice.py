"""Official rules of multiple-choice benchmarks: MMMU (-Pro), MVBench, Video-MME, SEED-Bench-R1, MathVerse, Geometry3K.

Sources: eval/eval_utils.py and mmmu-pro/evaluate.py of github.com/MMMU-Benchmark/MMMU (arXiv:2311.16502, 2409.02813);
mvbench of github.com/OpenGVLab/Ask-Anything (arXiv:2311.17005); eval_your_results.py of Video-MME (arXiv:2405.21075);
SEED-Bench-R1 (arXiv:2503.24376); evaluation/score_answer_s2.py of MathVerse (arXiv:2403.14624). Departures: where
MMMU-Pro draws a letter without a seed, no letter is chosen; where MathVerse asks a judge, its `--quick_match` decides.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import Final

from mmrl.benchmarks.benchmark import GradedResponse
from mmrl.benchmarks.extraction.match import is_correct
from mmrl.benchmarks.extraction.text import Extraction, first_answer_tag
from mmrl.benchmarks.items import LETTERS, Item, ItemResponse

_PUNCTUATION: Final = ",.!?;:'"
_BRACKETED_LETTER: Final = "({})"
_SPACED_LETTER: Final = " {} "
_MMMU_SEED: Final = 42
_MIN_WORDS_FOR_TEXT: Final = 5  # words beyond which the text of an option may count in place of its letter
_ANSWER_PREFIXES: Final = (
    *("The best answer is", "The correct answer is", "The answer is", "The answer", "The best option is"),
    *("The correct option is", "Best answer:", "Best option:"),
)
_KEY_WORDS: Final = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_NUMBER_PATTERNS: Final = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(r"-?(?<!\d)\d{1,60}(?:\.\d{1,60})?[eE][+-]?\d{1,60}"),
    re.compile(r"-?(?:(?<!\d)\d{1,60}\.\d+|\.\d+|(?<!\d)\d{1,60}\b)(?![eE][+-]?\d)(?![,\d])"),
)
# Characters at the end of a response in which numbers are searched; the time grows faster than the text.
_MAX_CHARS: Final = 4000


def score_mmmu(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Score as MMMU: a letter in brackets, else between spaces, else an option's text; of several, the last."""
    if not item.options:
        return float(_is_mmmu_open_correct(response.text, item.accepted_answers))
    return float(_mmmu_letter(item, response) in item.accepted_answers)


def draw_mmmu_letters(graded: Iterable[GradedResponse]) -> set[tuple[str, int]]:
    """Return item id and index of the responses without a letter for which MMMU draws the correct one at random.

    Its code seeds once with 42 and draws in the order of the questions, so the draws of a whole run can be repeated.
    """
    rng = random.Random(_MMMU_SEED)
    credited = set()
    for item, response, _ in graded:
        if not item.options or _mmmu_letter(item, response) is not None:
            continue
        if rng.choice(LETTERS[: len(item.options)]) in item.accepted_answers:
            credited.add((item.id, response.response_index))
    return credited


def _mmmu_letter(item: Item, response: ItemResponse) -> str | None:
    return parse_mmmu_letter(response.text, item.options, (_BRACKETED_LETTER, _SPACED_LETTER))


def score_mmmu_pro(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Score as MMMU-Pro: the one letter after the last "Answer:", else as MMMU with looser forms of letters."""
    after_answer = response.text.rpartition("Answer:")[2] if "Answer:" in response.text else ""
    named = [letter for letter in LETTERS[: len(item.options)] if letter in after_answer]
    if len(named) == 1:
        return float(named[0] in item.accepted_answers)
    letter = parse_mmmu_letter(response.text, item.options, (_BRACKETED_LETTER, "{} ", "{}."))
    return float(letter in item.accepted_answers)


def parse_mmmu_letter(text: str, options: Sequence[str], forms: Sequence[str]) -> str | None:
    """Return the letter that MMMU's parser chooses: the last one in the first of `forms`, as "({})", that occurs."""
    for mark in _PUNCTUATION:
        text = text.strip(mark)
    text = f" {text} "
    for form in forms:
        named = [letter for letter in LETTERS[: len(options)] if form.format(letter) in text]
        if named:
            # MMMU looks for the last letter between spaces even if it found letters in another form.
            last_form = form if form == _BRACKETED_LETTER else _SPACED_LETTER
            positions = [text.rfind(last_form.format(letter)) for letter in named]
            return named[positions.index(max(positions))]
    if len(text.split()) <= _MIN_WORDS_FOR_TEXT:
        return None
    lower = text.lower()
    places = [lower.rfind(option.lower()) for option in options]
    # Of options that begin at one place, the first.
    return LETTERS[places.index(max(places))] if max(places, default=-1) >= 0 else None


def score_mvbench(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Score as MVBench: the first word is part of "(a)", or the reverse."""
    # So "", "." and "(" are correct, as in the published code.
    first_word = response.text.lower().split(" ")[0]
    # Of equal options the published code takes the last.
    expected = f"({item.accepted_answers[-1].lower()})"
    return float(first_word.replace(".", "") in expected or expected in first_word)


def score_video_mme(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Score as Video-MME: the first of A, B, C, D without known openings."""
    text = response.text.strip()
    for prefix in _ANSWER_PREFIXES:
        text = text.replace(prefix, "")
    # The published pattern takes the first letter even if it begins a word.
    letter = re.search(r"[ABCD]", text)
    return float(letter is not None and letter[0] in item.accepted_answers)


def score_seed_bench_r1(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Score as SEED-Bench-R1: the first character in the answer tags."""
    answer = first_answer_tag(response.text)
    return float(answer is not None and answer.strip()[:1].upper() in item.accepted_answers)


def score_mathverse(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Score as MathVerse's quick match: the extraction equals the answer, character for character."""
    return float(extraction.value in (item.accepted_answers if item.options else [str(item.answer)]))


def score_geometry3k(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Score Geometry3K: the letter that our rules find, or the strict verdict on a formula."""
    # The published code grades the content of a box with mathruler.
    if item.options:
        return float(extraction.value in item.accepted_answers)
    return float(is_correct(item, response, extraction))


def _is_mmmu_open_correct(response: str, answers: Sequence[object]) -> bool:
    """Compare as MMMU's open questions: a number equal to two decimals, or a text within a key phrase."""
    expected = [form for accepted in answers for form in _normalized_forms(str(accepted))]
    predicted = [form for phrase in _key_phrases(response) for form in _normalized_forms(phrase)]
    expected_texts = [form for form in expected if isinstance(form, str)]
    for form in predicted:
        if isinstance(form, float) and form in expected:
            return True
        if isinstance(form, str) and any(text in form for text in expected_texts):
            return True
    return False


def _key_phrases(response: str) -> list[str]:
    """Return the shortest tail of each line after a key word, or the whole response; and all numbers in these."""
    text = response[-_MAX_CHARS:].strip().strip(".").lower()
    lines = text.split("\n")
    phrases = []
    for number, line in enumerate(lines, 1):
        key_words = (*_KEY_WORDS, "=") if number == len(lines) else _KEY_WORDS
        tails = [line.rpartition(key)[2].strip() for key in key_words if key in line]
        shortest = min(filter(None, tails), key=len, default="")
        if shortest and shortest not in _PUNCTUATION:
            phrases.append(shortest)
    phrases = phrases or [text]
    numbers = [number for phrase in phrases for pattern in _NUMBER_PATTERNS for number in pattern.findall(phrase)]
    return [*phrases, *numbers]


def _normalized_forms(text: str) -> list[str | float]:
    """Return a number to two decimals, or the text in lower case; a single letter with a space on either side."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        lower = text.lower()
        return [f" {lower}", f"{lower} "] if len(lower) == 1 else [lower]
