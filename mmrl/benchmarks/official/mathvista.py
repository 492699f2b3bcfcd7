"""MathVista's own metric, quirk for quirk: an extraction to a prediction, and a prediction to a verdict.

Source: evaluation/calculate_score.py of github.com/lupantech/MathVista, 53d52587 (arXiv:2310.02255). Departures: none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rapidfuzz.distance import Levenshtein

from mmrl.benchmarks.extraction.extract import Extraction
from mmrl.benchmarks.items import (
    Item,
    ItemAnswerType,
    ItemResponse,
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
"""Metadata by which results are broken down."""
_BRACKETED_LETTER: Final = re.compile(r"\(([a-zA-Z])\)")


def nearest_choice(text: str, choices: Sequence[str]) -> str:
    """The choice with the fewest edits from a text; the first of several. Every text has one."""
    return min(choices, key=lambda choice: Levenshtein.distance(text, choice))


def normalize_extraction(
    extraction: str,
    *,
    choices: Sequence[str] | None,
    answer_type: str,
    precision: float | None,
    digits_only: bool = False,
) -> str | None:
    """What an extraction counts as; None where it counts as nothing.

    A letter in brackets names its choice, and any other text the nearest one; integers are cut, floats rounded to
    `precision`. With `whole_digits` as the verdicts of 2023 were made: "18.0" is no integer.
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


def _match_choice(extraction: str, choices: Sequence[str]) -> str:
    if letters := _BRACKETED_LETTER.findall(extraction):
        extraction = letters[0].upper()
    place = ord(extraction) - ord("A") if len(extraction) == 1 else -1
    return choices[place] if 0 <= place < len(choices) else nearest_choice(extraction, choices)


def parse_mathvista_item(row: Mapping[str, Any]) -> Item:
    """An item in the columns of MathVista's testmini.

    Raises:
        ValueError: a column is missing or says what cannot be.
    """
    if absent := [column for column in MATHVISTA_COLUMNS if column not in row]:
        raise ValueError(
            f"has no column {', '.join(map(repr, absent))}; MathVista's items have {', '.join(MATHVISTA_COLUMNS)}, and may have "
            "question, unit and metadata"
        )
    kinds: Mapping[str, ItemAnswerType] = {"text": "choice", "integer": "integer", "float": "float", "list": "list"}
    kind = kinds.get(row["answer_type"])
    choices = parse_options(row["choices"])
    if kind is None or (kind == "choice") != bool(choices):
        raise ValueError(f"answer_type {row['answer_type']!r} and {len(choices)} choices do not go together")
    if not isinstance(row["answer"], str):
        raise ValueError(f"the answer is {row['answer']!r:.40}, not text")
    if kind == "choice" and row["answer"] not in choices:
        raise ValueError(f"the answer {row['answer']!r:.60} is none of the choices {', '.join(map(repr, choices))}")
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise ValueError(f"metadata is {metadata!r:.40}, not an object")
    groups = {name: subset_values(row[name]) for name in ("question_type", "answer_type") if row.get(name)}
    groups |= {name: subset_values(metadata[name]) for name in SUBSET_COLUMNS if metadata.get(name)}
    return Item(
        id=parse_id(row["pid"]),
        answer_type=kind,
        answer=parse_answer(kind, row["answer"], choices),
        question=text_cell(row, "question") or "",
        options=choices,
        precision=parse_precision(row["precision"]),
        unit=text_cell(row, "unit"),
        cluster=str(row.get("image") or row["pid"]),
        subsets=groups,
    )


def score_mathvista(item: Item, response: ItemResponse, extracted_answer: Extraction) -> float:
    """The official verdict, with what the rules find in place of GPT-4's extraction; nothing found is an empty text."""
    extraction = extraction_text(item, response.text, extracted_answer)
    said = normalize_extraction(
        extraction, choices=item.options, answer_type=item.answer_type, precision=item.precision
    )
    return float(said == item.answer)


def extraction_text(item: Item, response: str, extraction: Extraction) -> str:
    """The text that stands for GPT-4's extraction: the response itself where the official code takes it as it is."""
    if response.strip() in item.options:
        return response.strip()
    if extraction.number is not None:
        return str(int(extraction.number)) if extraction.number.is_integer() else repr(extraction.number)
    return extraction.value or ""
