"""How OCRBench, TextVQA and DocVQA, and R1-V's counting compare what was read.

Sources: OCRBench (arXiv:2305.07895, github.com/Yuliang-Liu/MultimodalOCR); VQA accuracy (visualqa.org/evaluation) with
the answer processing of TextVQA (arXiv:1904.08920); ANLS (arXiv:1905.13648); counting of R1-V
(github.com/Deep-Agent/R1-V). Departures: VQA's table of contractions ("dont" for "don't") is left out.
"""

from __future__ import annotations

import re
from typing import Final

from mmrl.benchmarks.extraction.extract import Extraction
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.benchmarks.reward_scores import reward_score
from mmrl.types import AnswerType
from mmrl_rewards import ocr

_MAX_CHARS: Final = 20_000  # characters
_TAGGED_COUNT: Final = re.compile(r"<answer>\s*(\d{1,9})\s*</answer>")
_FORMULA_CATEGORY: Final = "Handwritten Mathematical Expression Recognition"
_ARTICLES: Final = frozenset({"a", "an", "the"})
_WORD_DIGITS: Final = {
    word: str(value)
    for value, word in enumerate(
        ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    )
} | {"none": "0"}
_PUNCTUATION: Final = re.compile(r"[;/\[\]\"{}()=+\\_\-><@`?!]")
_PERIOD: Final = re.compile(r"(?<!\d)\.(?!\d)")
_COMMA: Final = re.compile(r"(\d)(,)(\d)")


def score_ocrbench(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """OCRBench: an answer stands somewhere in the response; for formulas (HME100k) white space aside, case kept."""
    formula = item.meta.get("dataset") == "HME100k" or item.meta.get("category") == _FORMULA_CATEGORY
    text = _remove_whitespace(response.text) if formula else _normalize_case(response.text)
    answers = [_remove_whitespace(answer) if formula else _normalize_case(answer) for answer in accepted_answers(item)]
    return float(any(answer in text for answer in answers))


def score_textvqa(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """VQA accuracy: over each choice of all but one of the people asked, min(1, how many of them said so / 3)."""
    said = normalize_vqa_answer(response.text[:_MAX_CHARS])
    people = [normalize_vqa_answer(answer) for answer in accepted_answers(item)]
    if len(people) == 1:
        return float(said == people[0])
    same = [person == said for person in people]
    return sum(min(1.0, (sum(same) - one) / 3) for one in same) / len(people)


def score_docvqa(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """ANLS of the whole response, the best over the answers."""
    said = response.text[:_MAX_CHARS].strip() or " "
    return max(reward_score(ocr.anls, AnswerType.TEXT, said, answer) for answer in accepted_answers(item))


def score_counting(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """R1-V's counting: the digits in the answer tags, and nothing else in them."""
    count = _TAGGED_COUNT.search(response.text)
    return float(count is not None and int(count[1]) == int(item.answer))


def normalize_vqa_answer(text: str) -> str:
    """An answer as VQA compares it: lower case, no punctuation or articles, digits for small numbers."""
    text = text.replace("\n", " ").replace("\t", " ").strip().lower()
    text = _COMMA.sub(r"\1\3", text)
    # A mark with white space beside it anywhere is dropped, since that joins no words.
    apart = {mark: "" if f"{mark} " in text or f" {mark}" in text else " " for mark in set(_PUNCTUATION.findall(text))}
    text = _PERIOD.sub("", _PUNCTUATION.sub(lambda mark: apart[mark[0]], text).replace(",", " "))
    return " ".join(_WORD_DIGITS.get(word, word) for word in text.split() if word not in _ARTICLES)


def accepted_answers(item: Item) -> list[str]:
    """Every right answer, as text."""
    return [str(answer) for answer in (item.answer if isinstance(item.answer, list) else [item.answer])]


def _normalize_case(text: str) -> str:
    return text.lower().strip().replace("\n", " ")


def _remove_whitespace(text: str) -> str:
    return "".join(text.split())
