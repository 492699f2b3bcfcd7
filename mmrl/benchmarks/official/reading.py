"""How OCRBench, TextVQA and DocVQA, and R1-V's counting compare what was read.

Sources: OCRBench (arXiv:2305.07895, github.com/Yuliang-Liu/MultimodalOCR); VQA accuracy (visualqa.org/evaluation) with
the answer processing of TextVQA (arXiv:1904.08920); ANLS (arXiv:1905.13648); counting of R1-V
(github.com/Deep-Agent/R1-V). Departures: VQA's table of contractions ("dont" for "don't") is left out.
"""

from __future__ import annotations

import re
from typing import Final

from mmrl.benchmarks.extraction.extract import Found
from mmrl.benchmarks.items import Item, Response
from mmrl.benchmarks.reward_scores import earned
from mmrl.types import Kind
from mmrl_rewards import ocr

_LONGEST: Final = 20_000  # characters
_COUNT: Final = re.compile(r"<answer>\s*(\d{1,9})\s*</answer>")
_FORMULAS: Final = "Handwritten Mathematical Expression Recognition"
_ARTICLES: Final = frozenset({"a", "an", "the"})
_WORDS: Final = {
    word: str(value)
    for value, word in enumerate(
        ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    )
} | {"none": "0"}
_BLANKED: Final = re.compile(r"[;/\[\]\"{}()=+\\_\-><@`?!]")
_PERIOD: Final = re.compile(r"(?<!\d)\.(?!\d)")
_COMMA: Final = re.compile(r"(\d)(,)(\d)")


def ocrbench(item: Item, response: Response, found: Found) -> float:
    """OCRBench: an answer stands somewhere in the response; for formulas (HME100k) white space aside, case kept."""
    formula = item.extra.get("dataset") == "HME100k" or item.extra.get("category") == _FORMULAS
    text = _squeezed(response.text) if formula else _flat(response.text)
    answers = [_squeezed(answer) if formula else _flat(answer) for answer in answers_of(item)]
    return float(any(answer in text for answer in answers))


def textvqa(item: Item, response: Response, found: Found) -> float:
    """VQA accuracy: over each choice of all but one of the people asked, min(1, how many of them said so / 3)."""
    said = processed(response.text[:_LONGEST])
    people = [processed(answer) for answer in answers_of(item)]
    if len(people) == 1:
        return float(said == people[0])
    same = [person == said for person in people]
    return sum(min(1.0, (sum(same) - one) / 3) for one in same) / len(people)


def anls(item: Item, response: Response, found: Found) -> float:
    """ANLS of the whole response, the best over the answers."""
    said = response.text[:_LONGEST].strip() or " "
    return max(earned(ocr.anls, Kind.TEXT, said, answer) for answer in answers_of(item))


def counting(item: Item, response: Response, found: Found) -> float:
    """R1-V's counting: the digits in the answer tags, and nothing else in them."""
    count = _COUNT.search(response.text)
    return float(count is not None and int(count[1]) == int(item.answer))


def processed(text: str) -> str:
    """An answer as VQA compares it: lower case, no punctuation or articles, digits for small numbers."""
    text = text.replace("\n", " ").replace("\t", " ").strip().lower()
    text = _COMMA.sub(r"\1\3", text)
    # A mark with white space beside it anywhere is dropped, since that joins no words.
    apart = {mark: "" if f"{mark} " in text or f" {mark}" in text else " " for mark in set(_BLANKED.findall(text))}
    text = _PERIOD.sub("", _BLANKED.sub(lambda mark: apart[mark[0]], text).replace(",", " "))
    return " ".join(_WORDS.get(word, word) for word in text.split() if word not in _ARTICLES)


def answers_of(item: Item) -> list[str]:
    """Every right answer, as text."""
    return [str(answer) for answer in (item.answer if isinstance(item.answer, list) else [item.answer])]


def _flat(text: str) -> str:
    return text.lower().strip().replace("\n", " ")


def _squeezed(text: str) -> str:
    return "".join(text.split())
