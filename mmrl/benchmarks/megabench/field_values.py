"""Values of answer fields in MEGA-Bench: lists, numbers and text, from JSON or Python literals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mmrl.benchmarks.extraction.fields import parse_written_value
from mmrl.benchmarks.extraction.numbers import find_numbers

_CLOSING_BRACKETS: Final = {"(": ")", "[": "]", "{": "}"}


def parse_entries(value: object, *, lowercase: bool = False) -> list[Any]:
    """Return the entries of a list as hashable values; for a mapping, its keys.

    Text is read as a literal, else as entries between commas, with or without brackets around all of them. An opening
    bracket that is never closed makes the list empty.
    """
    if isinstance(value, str):
        value = _parse_text_entries(value.strip(" "))
    match value:
        case None:
            entries: list[Any] = []
        case Sequence() | Mapping() | set():
            entries = list(value)
        case _:
            entries = [value]
    entries = list(map(_to_hashable, entries))
    if lowercase:
        return [entry.lower() if isinstance(entry, str) else entry for entry in entries]
    return entries


def to_text(value: object) -> str:
    """Return text as it is, and any other value as Python prints it."""
    return value if isinstance(value, str) else str(value)


def parse_numbers(value: object) -> list[float]:
    """Return the numbers in a text in reading order."""
    return [number.value for number in find_numbers(to_text(value))]


def _parse_text_entries(text: str) -> object:
    if not text:
        return []
    literal = parse_written_value(text)
    if literal == text and text[0] in _CLOSING_BRACKETS:
        if _CLOSING_BRACKETS[text[0]] != text[-1]:
            return []
        text = text[1:-1]
    if isinstance(literal, str):
        return [entry.strip() for entry in text.split(",")]
    return literal


def _to_hashable(value: object) -> Any:  # noqa: ANN401 - what a set may hold
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), repr(inner)) for key, inner in value.items()))
    return tuple(map(_to_hashable, value)) if isinstance(value, list | tuple | set) else value
