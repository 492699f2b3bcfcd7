r"""Official rules of MATH-Vision and EMMA, which read an answer from the text and compare it as a formula.

Sources: evaluation/evaluate.py and utils.py of github.com/mathllm/MATH-V (arXiv:2402.14804); the fast evaluation of
github.com/EMMA-Bench/EMMA (arXiv:2501.05444). Departures: MATH-Vision runs LaTeX as Python, and `latex_value` computes
what that gives; EMMA compares with sympy, and math-verify compares here, to the same two decimals.
"""

from __future__ import annotations

import re
from typing import Final

from mmrl.benchmarks.extraction.numbers import find_number_words
from mmrl.benchmarks.extraction.text import Extraction, last_boxed_span
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.benchmarks.official_metrics.latex_value import evaluate_latex
from mmrl.benchmarks.reward_scores import formulas_equal

_NUMERIC_TEXT: Final = re.compile(r"\d|\\pi|\\e\b")
_DECIMALS: Final = 2
_MAX_CHARS: Final = 20_000  # characters at the end of a response that are read
_MAX_COUNT_CHARS: Final = 40  # characters of an answer in which a number written as a word counts
_MATHVISION_FLAGS: Final = ("the final answer is", "the answer is", "the correct answer is", "the answer should be")
_EMMA_FLAGS: Final = ("final answer is", "correct answer is", "answer should be", "answer is", "answer:")
_LATEX_TEXT: Final = re.compile(r"\\text\{(.*?)\}")
# Applied in this order: a later replacement may match what an earlier one leaves.
_LATEX_REPLACEMENTS: Final = (
    *((" ", ""), ("\\,", ""), ("∞", "\\infty"), ("+\\infty", "\\infty"), ("\\\\", "\\"), ("\n", "")),
    *(("\\text", ""), ("\\mbox", ""), ("bmatrix", "pmatrix"), ("\\left", ""), ("\\right", "")),
    *(("^{\\circ}", ""), ("^\\circ", ""), ("{m}^3", ""), ("m^3", ""), ("{units}", ""), ("units", "")),
    *(("{km}", ""), ("km", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac")),
    *(("\\left", ""), ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", "")),
    *(("\\$", ""), ("$", ""), ("\\%", ""), ("{.", "{0.")),
)
_BARE_ROOT: Final = re.compile(r"\\sqrt(?!\{)(.)", re.DOTALL)
_BARE_NUMERATOR: Final = re.compile(r"\\frac([^{])(?=.)", re.DOTALL)
_BARE_DENOMINATOR: Final = re.compile(r"(\\frac\{[^{}]\})([^{])", re.DOTALL)
_SLASH: Final = re.compile(r"(-?\d+)/(-?\d+)", re.ASCII)


def score_mathvision(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Score as MATH-Vision: its reading of the response equals the letter or the text of the answer."""
    prediction = parse_mathvision_answer(response.text)
    accepted = [*item.accepted_answers, item.answer_text] if item.options else [item.answer_text]
    return float(any(_mathvision_equal(prediction, answer) for answer in accepted))


def parse_mathvision_answer(response: str) -> str:
    """Return the text that MATH-Vision compares, in lower case and without white space."""
    text = response.strip()
    for letter in "ABCDE":
        starts = (f"{letter}\n", f"({letter})\n", f"({letter}) {letter}\n")
        if text.endswith((f" {letter}.", f" ({letter}).")) or text.startswith(starts):
            text = letter
    tail = text.split("is ")[-1].rstrip(".")
    text = tail if _is_number(tail) else text
    num_boxes = text.count("oxed{")
    if num_boxes == 0:
        # Each flag is tried in lower case and with a capital; a later one cuts what an earlier one left.
        for lower_flag in _MATHVISION_FLAGS:
            for flag in (lower_flag, lower_flag.replace("the", "The")):
                if flag in text:
                    text = text.rsplit(flag, maxsplit=1)[-1].strip().split("\n")[0].split(". ")[0]
    elif num_boxes > 1:
        text = "\\boxed{" + text.split("oxed{")[-1]
    text = _strip_latex(text)
    for letter in "abcde":
        text = text.replace(f"({letter})", letter).replace(f"{{{letter}}}", letter)
    return text.rstrip(".").lstrip(":").strip()


def score_emma(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    r"""Score as EMMA: a leading letter or number, the last box (or the last \text in it), or the text after a flag."""
    prediction = parse_emma_answer(response.text[-_MAX_CHARS:])
    expected = item.accepted_answers[0] if item.options else str(item.answer)
    if _emma_equal(prediction, expected):
        return 1.0
    if len(prediction) >= _MAX_COUNT_CHARS:
        return 0.0
    number = next(find_number_words(prediction), None)
    return float(number is not None and expected.strip() == f"{number.value:g}")


def parse_emma_answer(response: str) -> str:
    """Return the text that EMMA compares; empty when it finds no answer."""
    text = response.strip()
    for letter in "ABCDEFGH":
        if text.upper() == letter or text.startswith((f"{letter}:", f"{letter}.")):
            return letter
    if _is_number(text):
        return text
    box = last_boxed_span(text)
    if box:
        inner = text[slice(*box)]
        latex_texts = _LATEX_TEXT.findall(inner)
        return (latex_texts[-1] if latex_texts else inner).strip()
    lower = text.lower()
    for flag in _EMMA_FLAGS:
        if flag in lower:
            return lower.split(flag)[-1].strip().split("\n")[0].split(".")[0]
    return ""


def _strip_latex(text: str) -> str:
    """Return what MATH-Vision compares: the last side of an equation in the outermost box, without units and layout."""
    text = text.lower().replace("{}", "")
    start, end = text.find("oxed{"), text.rfind("}")
    if 0 <= start < end:
        text = text[start + len("oxed{") : end]
    closing, opening = text.find("}"), text.find("{")
    if closing >= 0 and (opening < 0 or closing < opening):
        text = text[:closing]
    text = text.split("=")[-1].split("\\approx")[-1]
    for old, new in _LATEX_REPLACEMENTS:
        text = text.replace(old, new)
    if text.startswith("."):
        text = f"0{text}"
    if "sqrt" in text:
        # Braces are added to fractions only where there is a root, as in the published code.
        text = _BARE_NUMERATOR.sub(r"\\frac{\1}", _BARE_ROOT.sub(r"\\sqrt{\1}", text))
        text = _BARE_DENOMINATOR.sub(r"\1{\2}", text)
    if text == "0.5":
        return "\\frac{1}{2}"
    ratio = _SLASH.fullmatch(text)
    return f"\\frac{{{ratio[1]}}}{{{ratio[2]}}}" if ratio else text


def _mathvision_equal(prediction: str, reference: str) -> bool:
    """Return True for equal texts, for equal lists in brackets, and for formulas of one value to two decimals."""
    prediction, reference = prediction.lower(), reference.lower()
    if not (prediction.replace(" ", "") and reference.replace(" ", "")):
        return False
    if prediction.strip() == reference.strip() or _round_entries(prediction) == _round_entries(reference):
        return True
    value = evaluate_latex(prediction)
    return value is not None and value == evaluate_latex(reference)


def _round_entries(text: str) -> str:
    """Return "(1, 4/3)" as "(1,1.33)"; a text that is not a list of formulas in round or square brackets as it is."""
    entries = text[1:-1].split(",")
    if len(entries) == 1 or (text[0], text[-1]) not in (("(", ")"), ("[", "]")):
        return text
    rounded = []
    for entry in entries:
        is_name = "infty" in entry or entry in ("a", "-a")
        value = entry if is_name else evaluate_latex(entry)
        if value is None:
            return text
        rounded.append(str(value))
    return f"{text[0]}{','.join(rounded)}{text[-1]}"


def _emma_equal(prediction: str, reference: str) -> bool:
    """Return True for equal texts, and for formulas without unknowns that are equal to two decimals."""
    prediction, reference = prediction.lower().strip(), reference.lower().strip()
    if not (prediction and reference):
        return False
    if prediction == reference:
        return True
    if not (_NUMERIC_TEXT.search(prediction) and _NUMERIC_TEXT.search(reference)):
        return False
    return formulas_equal(prediction, reference, _DECIMALS)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
