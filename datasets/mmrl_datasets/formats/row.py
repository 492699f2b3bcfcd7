"""A row of any file, and how to say that it is of no use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

Cells = Mapping[str, Any]


class BadRowError(Exception):
    """Why one row cannot be used."""


class MissingColumnError(BadRowError):
    """A row that lacks a column: a bad row when others have it, a wrong setting when none does."""

    def __init__(self, column: str, cells: Cells) -> None:
        super().__init__(f"there is no column {column!r}{did_you_mean(column, cells)}; there are {', '.join(cells)}")
        self.column = column


class Row(NamedTuple):
    """A row: its name within the file (`line-7`), its place (`a.jsonl:7`), and its cells or what is wrong with it."""

    name: str
    location: str
    cells: Cells | BadRowError


def has_column(cells: Cells, column: str) -> bool:
    """Whether `cell` finds that column."""
    return _look_up(cells, column)[0]


def get_cell(cells: Cells, column: str) -> object:
    """The value of a column; `a.b` is the column of that name, or else what column `a` has under the key `b`.

    Raises:
        MissingColumnError: the row has no such column.
    """
    found, value = _look_up(cells, column)
    if not found:
        raise MissingColumnError(column, cells)
    return value


def _look_up(cells: Cells, column: str) -> tuple[bool, object]:
    if column in cells:
        return True, cells[column]
    outer, _, inner = column.partition(".")
    nested = cells.get(outer)
    return _look_up(nested, inner) if inner and isinstance(nested, Mapping) else (False, None)


def short_repr(value: object) -> str:
    """The value as Python writes it, shortened to fit a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint at the most similar known word, or nothing."""
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
