"""How MATH-Vision and EMMA read an answer and compare it. Nothing is evaluated as a program.

Sources: evaluation/evaluate.py and utils.py of github.com/mathllm/MATH-V (arXiv:2402.14804); the fast evaluation of
github.com/EMMA-Bench/EMMA (arXiv:2501.05444). Departures: both turn LaTeX into Python and run it; math-verify compares
instead, to the same two decimals.
"""

from __future__ import annotations

import re
from typing import Final

from mmrl.benchmarks.extraction.extract import Extraction
from mmrl.benchmarks.extraction.numbers import find_number_words
from mmrl.benchmarks.extraction.text import last_boxed_span
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.benchmarks.official.multiple_choice import correct_letter
from mmrl.benchmarks.reward_scores import formulas_equal

_NUMERIC_TEXT: Final = re.compile(r"\d|\\pi|\\e\b")
_DECIMALS: Final = 2
_MAX_CHARS: Final = 20_000  # characters
_MATHVISION_FLAGS: Final = ("the final answer is", "the answer is", "the correct answer is", "the answer should be")
_EMMA_FLAGS: Final = ("final answer is", "correct answer is", "answer should be", "answer is", "answer:")
_LATEX_TEXT: Final = re.compile(r"\\text\{(.*?)\}")
_REMOVED_LATEX: Final = (
    *(" ", "\\,", "\n", "\\text", "\\mbox", "\\left", "\\right", "^{\\circ}", "^\\circ", "{m}^3", "m^3"),
    *("{units}", "units", "{km}", "km", "\\!", "\\$", "$", "\\%"),
)


def score_mathvision(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """MATH-Vision: its reading of the response equals the letter, or the value, of the answer."""
    said = parse_mathvision_answer(response.text[-_MAX_CHARS:])
    due = [correct_letter(item), str(item.answer)] if item.options else [str(item.answer)]
    return float(any(_answers_equal(said, answer) for answer in due))


def parse_mathvision_answer(response: str) -> str:
    """The text that MATH-Vision compares, in lower case and without white space."""
    text = response.strip()
    for letter in "ABCDE":
        starts = (f"{letter}\n", f"({letter})\n", f"({letter}) {letter}\n")
        if text.endswith((f" {letter}.", f" ({letter}).")) or text.startswith(starts):
            text = letter
    tail = text.split("is ")[-1].rstrip(".")
    text = tail if _is_number(tail) else text
    if "oxed{" not in text:
        for flag in (form for lower in _MATHVISION_FLAGS for form in (lower, lower.replace("the", "The"))):
            if flag in text:
                text = text.split(flag)[-1].strip().split("\n")[0].split(". ")[0]
    elif text.count("oxed{") > 1:
        text = "\\boxed{" + text.split("oxed{")[-1]
    text = _strip_latex(text)
    for letter in "abcde":
        text = text.replace(f"({letter})", letter).replace(f"{{{letter}}}", letter)
    return text.rstrip(".").lstrip(":").strip()


def score_emma(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    r"""EMMA: a leading letter or number, the last box (or the last \text in it), or what follows a known phrase."""
    said = parse_emma_answer(response.text[-_MAX_CHARS:])
    due = correct_letter(item) if item.options else str(item.answer)
    counted = next((one.value for one in find_number_words(said)), None) if len(said) < 40 else None
    return float(_answers_equal(said, due) or (counted is not None and due.strip() == f"{counted:g}"))


def parse_emma_answer(response: str) -> str:
    """The text that EMMA compares."""
    text = response.strip()
    for letter in "ABCDEFGH":
        if text.upper() == letter or text.startswith((f"{letter}:", f"{letter}.")):
            return letter
    if _is_number(text):
        return text
    if box := last_boxed_span(text):
        inner = text[slice(*box)]
        told = _LATEX_TEXT.findall(inner)
        return (told[-1] if told else inner).strip()
    lower = text.lower()
    for flag in _EMMA_FLAGS:
        if flag in lower:
            return lower.split(flag)[-1].strip().split("\n")[0].split(".")[0]
    return ""


def _strip_latex(text: str) -> str:
    """The content of the outermost box, else all of it; what follows the last =; without units and layout."""
    text = text.lower().replace("{}", "")
    start, end = text.find("oxed{"), text.rfind("}")
    if 0 <= start < end:
        text = text[start + len("oxed{") : end]
    close, opening = text.find("}"), text.find("{")
    if close >= 0 and (opening < 0 or close < opening):
        text = text[:close]
    text = text.split("=")[-1].split("\\approx")[-1]
    for dropped in _REMOVED_LATEX:
        text = text.replace(dropped, "")
    return text.replace("dfrac", "frac").replace("tfrac", "frac")


def _answers_equal(prediction: str, reference: str) -> bool:
    """Alike, or numbers equal to two decimals; formulas with unknowns cannot be evaluated."""
    prediction, reference = prediction.lower().strip(), reference.lower().strip()
    numeric = _NUMERIC_TEXT.search(prediction) and _NUMERIC_TEXT.search(reference)
    return bool(prediction and reference) and (
        prediction == reference or (bool(numeric) and formulas_equal(prediction, reference, _DECIMALS))
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
