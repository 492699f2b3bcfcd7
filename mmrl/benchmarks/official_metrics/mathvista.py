"""MathVista's official metric: from an extraction to a prediction, and from a prediction to a verdict.

Source: evaluation/calculate_score.py of github.com/lupantech/MathVista, 53d52587 (arXiv:2310.02255). Departures: none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from rapidfuzz.distance import Levenshtein

from mmrl.benchmarks.extraction.text import Extraction
from mmrl.benchmarks.items import (
    Item,
    ItemAnswerType,
    ItemResponse,
    find_option,
    object_cell,
    parse_answer,
    parse_id,
    parse_options,
    parse_precision,
    subset_values,
    text_cell,
)

MATHVISTA_COLUMNS: Final = ("pid", "answer", "answer_type", "choices", "precision")
"""Columns that every item has."""
SUBSET_COLUMNS: Final = ("language", "source", "category", "task", "context", "grade", "skills")
"""Keys of `metadata` by which results are broken down."""
_BRACKETED_LETTER: Final = re.compile(r"\(([a-zA-Z])\)")
_ANSWER_TYPES: Final[Mapping[str, ItemAnswerType]] = {
    "text": "choice",
    "integer": "integer",
    "float": "float",
    "list": "list",
}


def score_mathvista(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Score as MathVista, with the answer that our rules find in place of GPT-4's extraction."""
    if response.text.strip() in item.options:
        # The official code does not ask GPT-4 about a response that is an option.
        extracted = response.text.strip()
    elif extraction.number is not None:
        extracted = str(int(extraction.number)) if extraction.number.is_integer() else repr(extraction.number)
    else:
        extracted = extraction.value or ""
    prediction = normalize_extraction(
        extracted, choices=item.options, answer_type=item.answer_type, precision=item.precision
    )
    return float(prediction == item.answer_text)


def normalize_extraction(
    extraction: str,
    *,
    choices: Sequence[str] | None,
    answer_type: str,
    precision: float | None,
    digits_only: bool = False,
) -> str | None:
    """Return MathVista's prediction for an extraction, or None where it makes none.

    A letter in brackets means its choice, and any other text for the nearest one. Integers are cut off, floats
    rounded to `precision` decimals. With `digits_only`, "18.0" is not an integer, as in the verdicts of 2023.
    """
    if choices:
        return _match_choice(extraction.strip(), choices)
    try:
        match answer_type:
            case "integer":
                return str(int(extraction) if digits_only else int(float(extraction)))
            case "float":
                return str(round(float(extraction), int(precision or 0)))
            case _:
                return str(extraction)
    except (ValueError, OverflowError):
        return None


def parse_mathvista_item(row: Mapping[str, Any]) -> Item:
    """Return the item of a row in the columns of MathVista's testmini.

    Raises:
        ValueError: a column is missing or holds an impossible value.
    """
    absent = [column for column in MATHVISTA_COLUMNS if column not in row]
    if absent:
        raise ValueError(
            f"has no column {', '.join(map(repr, absent))}; MathVista's items have {', '.join(MATHVISTA_COLUMNS)}, and "
            "may have question, unit and metadata"
        )
    answer_type = _ANSWER_TYPES.get(row["answer_type"])
    choices = parse_options(row["choices"])
    if answer_type is None or (answer_type == "choice") != bool(choices):
        raise ValueError(f"answer_type {row['answer_type']!r} and {len(choices)} choices do not go together")
    if not isinstance(row["answer"], str):
        raise ValueError(f"the answer is {row['answer']!r:.40}, not text")
    metadata = object_cell(row, "metadata")
    subsets = {name: subset_values(row[name]) for name in ("question_type", "answer_type") if row.get(name)}
    subsets |= {name: subset_values(metadata[name]) for name in SUBSET_COLUMNS if metadata.get(name)}
    return Item(
        id=parse_id(row["pid"]),
        answer_type=answer_type,
        # A choice is given by its text, even where that is a letter.
        answer=find_option(row["answer"], choices) if choices else parse_answer(answer_type, row["answer"], ()),
        question=text_cell(row, "question") or "",
        options=choices,
        precision=parse_precision(row["precision"]),
        unit=text_cell(row, "unit"),
        cluster=str(row.get("image") or row["pid"]),
        subsets=subsets,
    )


def _match_choice(extraction: str, choices: Sequence[str]) -> str:
    letters = _BRACKETED_LETTER.findall(extraction)
    if letters:
        extraction = letters[0].upper()
    index = ord(extraction) - ord("A") if len(extraction) == 1 else -1
    if 0 <= index < len(choices):
        return choices[index]
    # Any other text is the choice with the fewest edits from it, of several the first.
    return min(choices, key=partial(Levenshtein.distance, extraction))
