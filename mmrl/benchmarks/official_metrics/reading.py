"""Official rules of benchmarks that read from images: OCRBench, TextVQA, DocVQA, and R1-V's counting.

Sources: OCRBench (arXiv:2305.07895, github.com/Yuliang-Liu/MultimodalOCR); VQA accuracy (visualqa.org/evaluation) with
the answer processing of TextVQA (arXiv:1904.08920); ANLS (arXiv:1905.13648); counting of R1-V
(github.com/Deep-Agent/R1-V). Departures: VQA's table of contractions ("dont" for "don't") is left out.
"""

from __future__ import annotations

import re
from functools import partial
from math import nextafter
from typing import Final

from mmrl.benchmarks.extraction.numbers import find_numbers
from mmrl.benchmarks.extraction.text import Extraction
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.benchmarks.reward_scores import reward_score
from mmrl.types import AnswerType
from mmrl_rewards import ocr
from mmrl_rewards.number_words import ONES

_MAX_CHARS: Final = 20_000  # characters at the start of a response that are compared
_TAGGED_COUNT: Final = re.compile(r"<answer>\s*(\d{1,9})\s*</answer>")
_FORMULA_DATASET: Final = "HME100k"
_FORMULA_CATEGORY: Final = "Handwritten Mathematical Expression Recognition"
_ARTICLES: Final = frozenset({"a", "an", "the"})
_WORD_DIGITS: Final = {"none": "0", **{word: str(value) for value, word in enumerate(ONES[:11])}}
_PUNCTUATION: Final = re.compile(r"[;/\[\]\"{}()=+\\_\-><@`?!]")
_PERIOD: Final = re.compile(r"(?<!\d)\.(?!\d)")
_COMMA: Final = re.compile(r"(\d)(,)(\d)")
_ANLS_THRESHOLD: Final = nextafter(0.5, 1.0)  # distances below it count, so that 0.5 does
_NUM_AGREEING: Final = 3  # people who must agree for full marks in VQA


def score_ocrbench(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Score as OCRBench: an accepted answer is anywhere in the response.

    Formulas are compared without white space but with their case, other texts without case.
    """
    is_formula = item.meta.get("dataset") == _FORMULA_DATASET or item.meta.get("category") == _FORMULA_CATEGORY
    texts = [response.text, *map(str, item.accepted_answers)]
    if is_formula:
        texts = ["".join(text.split()) for text in texts]
    else:
        texts = [text.lower().strip().replace("\n", " ") for text in texts]
    return float(any(answer in texts[0] for answer in texts[1:]))


def score_textvqa(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Score by VQA accuracy: the mean of min(1, agreeing people / 3), leaving out each person in turn."""
    prediction = normalize_vqa_answer(response.text[:_MAX_CHARS])
    people = list(map(normalize_vqa_answer, map(str, item.accepted_answers)))
    if len(people) == 1:
        return float(prediction == people[0])
    agrees = [answer == prediction for answer in people]
    # Leaving out a person who agrees leaves one fewer.
    return sum(min(1.0, (sum(agrees) - agreed) / _NUM_AGREEING) for agreed in agrees) / len(people)


def score_docvqa(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Score as DocVQA: the best ANLS of the whole response over the accepted answers.

    Published scripts keep a similarity of exactly one half, which the paper, and the reward `anls`, set to 0.
    """
    prediction = response.text[:_MAX_CHARS].strip() or " "
    score = partial(reward_score, ocr.anls, AnswerType.TEXT, prediction, threshold=_ANLS_THRESHOLD)
    return max(score(str(answer)) for answer in item.accepted_answers)


def score_counting(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Score as R1-V: the answer tags hold the right digits and nothing else."""
    count = _TAGGED_COUNT.search(response.text)
    return float(count is not None and int(count[1]) == next(find_numbers(str(item.answer))).value)


def normalize_vqa_answer(text: str) -> str:
    """Return an answer as VQA compares it: lower case, no punctuation or articles, digits for small numbers."""
    text = text.replace("\n", " ").replace("\t", " ").strip().lower()
    text = _COMMA.sub(r"\1\3", text)
    # A mark with a space beside it anywhere is removed, since that joins no words; any other becomes a space.
    substitutes = {}
    for mark in set(_PUNCTUATION.findall(text)):
        substitutes[mark] = "" if f"{mark} " in text or f" {mark}" in text else " "
    text = _PUNCTUATION.sub(lambda match: substitutes[match[0]], text)
    text = _PERIOD.sub("", text.replace(",", " "))
    return " ".join(_WORD_DIGITS.get(word, word) for word in text.split() if word not in _ARTICLES)
