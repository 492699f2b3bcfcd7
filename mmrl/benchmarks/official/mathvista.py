"""MathVista's own metric, quirk for quirk: an extraction to a prediction, and a prediction to a verdict.

Source: evaluation/calculate_score.py of github.com/lupantech/MathVista, 53d52587 (arXiv:2310.02255). Departures: none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rapidfuzz.distance import Levenshtein

from mmrl.benchmarks.extraction.extract import Found
from mmrl.benchmarks.items import AnswerType, Item, Response, decimals, due, grouped, identity, options_in, written

COLUMNS: Final = ("pid", "answer", "answer_type", "choices", "precision")
"""Columns that every item has."""
SUBSETS: Final = ("language", "source", "category", "task", "context", "grade", "skills")
"""Metadata by which results are broken down."""
_LETTER: Final = re.compile(r"\(([a-zA-Z])\)")


def nearest(text: str, choices: Sequence[str]) -> str:
    """The choice with the fewest edits from a text; the first of several. Every text has one."""
    return min(choices, key=lambda choice: Levenshtein.distance(text, choice))


def prediction(
    extraction: str,
    *,
    choices: Sequence[str] | None,
    answer_type: str,
    precision: float | None,
    whole_digits: bool = False,
) -> str | None:
    """What an extraction counts as; None where it counts as nothing.

    A letter in brackets names its choice, and any other text the nearest one; integers are cut, floats rounded to
    `precision`. With `whole_digits` as the verdicts of 2023 were made: "18.0" is no integer.
    """
    if choices:
        return _option(extraction.strip(), choices)
    try:
        match answer_type:
            case "integer":
                return str(int(extraction) if whole_digits else int(float(extraction)))
            case "float":
                return str(round(float(extraction), int(precision or 0)))
            case _:
                return str(extraction)
    except (ValueError, OverflowError):
        return None


def _option(extraction: str, choices: Sequence[str]) -> str:
    if letters := _LETTER.findall(extraction):
        extraction = letters[0].upper()
    place = ord(extraction) - ord("A") if len(extraction) == 1 else -1
    return choices[place] if 0 <= place < len(choices) else nearest(extraction, choices)


def item(row: Mapping[str, Any]) -> Item:
    """An item in the columns of MathVista's testmini.

    Raises:
        ValueError: a column is missing or says what cannot be.
    """
    if absent := [column for column in COLUMNS if column not in row]:
        raise ValueError(
            f"has no column {', '.join(map(repr, absent))}; MathVista's items have {', '.join(COLUMNS)}, and may have "
            "question, unit and metadata"
        )
    kinds: Mapping[str, AnswerType] = {"text": "choice", "integer": "integer", "float": "float", "list": "list"}
    kind = kinds.get(row["answer_type"])
    choices = options_in(row["choices"])
    if kind is None or (kind == "choice") != bool(choices):
        raise ValueError(f"answer_type {row['answer_type']!r} and {len(choices)} choices do not go together")
    if not isinstance(row["answer"], str):
        raise ValueError(f"the answer is {row['answer']!r:.40}, not text")
    if kind == "choice" and row["answer"] not in choices:
        raise ValueError(f"the answer {row['answer']!r:.60} is none of the choices {', '.join(map(repr, choices))}")
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise ValueError(f"metadata is {metadata!r:.40}, not an object")
    groups = {name: grouped(row[name]) for name in ("question_type", "answer_type") if row.get(name)}
    groups |= {name: grouped(metadata[name]) for name in SUBSETS if metadata.get(name)}
    return Item(
        id=identity(row["pid"]),
        kind=kind,
        answer=due(kind, row["answer"], choices),
        question=written(row, "question") or "",
        options=choices,
        precision=decimals(row["precision"]),
        unit=written(row, "unit"),
        cluster=str(row.get("image") or row["pid"]),
        groups=groups,
    )


def credit(item: Item, response: Response, found: Found) -> float:
    """The official verdict, with what the rules find in place of GPT-4's extraction; nothing found is an empty text."""
    extraction = extracted(item, response.text, found)
    said = prediction(extraction, choices=item.options, answer_type=item.kind, precision=item.precision)
    return float(said == item.answer)


def extracted(item: Item, response: str, found: Found) -> str:
    """The text that stands for GPT-4's extraction: the response itself where the official code takes it as it is."""
    if response.strip() in item.options:
        return response.strip()
    if found.number is not None:
        return str(int(found.number)) if found.number.is_integer() else repr(found.number)
    return found.value or ""
