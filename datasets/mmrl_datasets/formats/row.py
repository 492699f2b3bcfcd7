"""A row of any file, access to its cells, and the errors that say why a row cannot be used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mmrl.utils import messages

Cells = Mapping[str, Any]  # the values of a row by column name
_MAX_REPR_CHARS = 60


class BadRowError(Exception):
    """Says why one row cannot be used; readers turn it into a `RejectedRow`."""


class MissingColumnError(BadRowError):
    """Says that a row lacks a column. If every row lacks it, the setting that names it is wrong, not the row."""

    def __init__(self, column: str, cells: Cells) -> None:
        super().__init__(f"there is no column {column!r}{did_you_mean(column, cells)}; there are {', '.join(cells)}")
        self.column = column


class Row(NamedTuple):
    """One row of a file."""

    name: str  # the row within its file, such as `line-7`: its id unless a column gives one
    location: str  # the row for error messages, such as `a.jsonl:7`
    cells: Cells | BadRowError  # the values, or the reason why they cannot be read


def has_column(cells: Cells, column: str) -> bool:
    """Return True if `get_cell` would find the column."""
    return _look_up(cells, column)[0]


def get_cell(cells: Cells, column: str) -> object:
    """Return the value of a column; raises MissingColumnError if the row has none of that name.

    `a.b` is the column of that name or, if there is none, the value under the key `b` in column `a`.
    """
    found, value = _look_up(cells, column)
    if not found:
        raise MissingColumnError(column, cells)
    return value


def _look_up(cells: Cells, column: str) -> tuple[bool, object]:
    # True if the column was found, and its value, which may be None. Published tables have names with dots in them,
    # so the whole name is tried first.
    if column in cells:
        return True, cells[column]
    outer, _, inner = column.partition(".")
    nested = cells.get(outer)
    if inner and isinstance(nested, Mapping):
        return _look_up(nested, inner)
    return False, None


def short_repr(value: object) -> str:
    """Return the repr of a value, shortened to fit an error message."""
    text = repr(value)
    return text if len(text) <= _MAX_REPR_CHARS else f"{text[: _MAX_REPR_CHARS - 3]}..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint in parentheses at the known word that is most similar, or an empty string if none is similar."""
    hint = messages.did_you_mean(word, known)
    return f" ({hint})" if hint else ""
