"""MathVista's official metric: from an extraction to a prediction, and from a prediction to a verdict.

Source: evaluation/calculate_score.py of github.com/lupantech/MathVista, 53d52587 (arXiv:2310.02255). Departures: none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

from pydantic import BaseModel, StrictStr
from rapidfuzz.distance import Levenshtein

from mmrl.benchmarks.extraction.text import Extraction
from mmrl.benchmarks.items import (
    Item,
    ItemAnswerType,
    ItemResponse,
    OptionalPrecision,
    OptionalText,
    OptionTexts,
    RowId,
    check_columns,
    find_option,
    parse_answer,
    subset_values,
)

SUBSET_COLUMNS: Final = ("language", "source", "category", "task", "context", "grade", "skills")
"""Keys of `metadata` by which results are broken down."""
_BRACKETED_LETTER: Final = re.compile(r"\(([a-zA-Z])\)")


def score_mathvista(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Score as MathVista, with the answer that our rules find in place of GPT-4's extraction."""
    if response.text.strip() in item.options:
        # The official code does not ask GPT-4 about a response that is an option.
        extracted = response.text.strip()
    elif extraction.number is not None:
        extracted = str(int(extraction.number)) if extraction.number.is_integer() else repr(extraction.number)
    else:
        extracted = extraction.value or ""
    return float(normalize_extraction(extracted, item) == item.answer_text)


def normalize_extraction(extraction: str, item: Item, *, digits_only: bool = False) -> str | None:
    """Return MathVista's prediction for an extraction, or None where it makes none.

    A letter in brackets means its choice, and any other text for the nearest one. Integers are cut off, floats
    rounded to the item's precision. With `digits_only`, "18.0" is not an integer, as in the verdicts of 2023.
    """
    if item.options:
        return _match_choice(extraction.strip(), item.options)
    try:
        match item.answer_type:
            case "integer":
                return str(int(extraction) if digits_only else int(float(extraction)))
            case "float":
                return str(round(float(extraction), item.precision or 0))
            case _:
                return str(extraction)
    except (ValueError, OverflowError):
        return None


class _MathVistaRow(BaseModel):
    pid: RowId
    answer: StrictStr
    answer_type: Literal["text", "integer", "float", "list"]
    choices: OptionTexts | None
    precision: OptionalPrecision
    question: OptionalText = None
    unit: OptionalText = None
    metadata: dict[str, Any] | None = None
    question_type: Any = None
    image: Any = None


def parse_mathvista_item(row: Mapping[str, Any]) -> Item:
    """Return the item of a row in the columns of MathVista's testmini.

    Raises:
        ValueError: a column is missing or holds an impossible value.
    """
    cells = check_columns(_MathVistaRow, row)
    choices, metadata = tuple(cells.choices or ()), cells.metadata or {}
    answer_type: ItemAnswerType = "choice" if cells.answer_type == "text" else cells.answer_type
    if (answer_type == "choice") != bool(choices):
        raise ValueError(f"answer_type {cells.answer_type!r} and {len(choices)} choices do not go together")
    columns = {"question_type": cells.question_type, "answer_type": cells.answer_type}
    columns |= {name: metadata.get(name) for name in SUBSET_COLUMNS}
    return Item(
        id=str(cells.pid),
        answer_type=answer_type,
        # A choice is given by its text, even where that is a letter.
        answer=find_option(cells.answer, choices) if choices else parse_answer(answer_type, cells.answer, ()),
        question=cells.question or "",
        options=choices,
        precision=cells.precision,
        unit=cells.unit,
        cluster=str(cells.image or cells.pid),
        subsets={name: subset_values(value) for name, value in columns.items() if value},
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
