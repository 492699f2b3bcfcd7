"""What fields of MEGA-Bench's answers say: JSON or Python's literals, lists, numbers, text."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mmrl.benchmarks.extraction.numbers import find_numbers

MAX_FIELD_CHARS: Final = 20_000
"""Characters of a field that are looked at."""
_CLOSING_BRACKETS: Final = {"(": ")", "[": "]", "{": "}"}


def select_fields(text: str, names: Sequence[str]) -> Mapping[str, Any]:
    """What a text says for each field: those of the JSON object in it; all of the text where there is none."""
    found = parse_fields(text)
    rest = "" if found and len(names) > 1 else text
    return {name: found.get(name, rest) for name in names}


def parse_fields(text: str) -> Mapping[str, Any]:
    """The fields of the JSON object in a text, or of a mapping as Python writes it; none if there is none."""
    value = _parse_literal(text[text.find("{") : text.rfind("}") + 1])
    return value if isinstance(value, Mapping) else {}


def _parse_literal(text: str) -> object:
    """What JSON or Python's literals say; the text itself where they say nothing."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text.strip()[:MAX_FIELD_CHARS])
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return text


def parse_entries(value: object, *, lowercase: bool = False) -> list[Any]:
    """The entries of a list, of text that writes one, or between commas; those of a mapping are its keys."""
    if isinstance(value, str):
        written = value.strip(" ")
        literal = _parse_literal(written) if written else []
        if literal == written and _CLOSING_BRACKETS.get(written[0]) == written[-1:]:
            written = written[1:-1]
        elif literal == written and written[0] in _CLOSING_BRACKETS:
            return []
        value = [entry.strip() for entry in written.split(",")] if isinstance(literal, str) else literal
    entries = [*value] if isinstance(value, Sequence | Mapping | set) else [] if value is None else [value]
    frozen = [_to_hashable(entry) for entry in entries]
    return [entry.lower() if isinstance(entry, str) else entry for entry in frozen] if lowercase else frozen


def _to_hashable(value: object) -> Any:  # noqa: ANN401 - what a set may hold
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), repr(inner)) for key, inner in value.items()))
    return tuple(map(_to_hashable, value)) if isinstance(value, list | tuple | set) else value


def to_text(value: object) -> str:
    """Text as it is, everything else as Python writes it."""
    return value if isinstance(value, str) else str(value)


def parse_numbers(value: object) -> list[float]:
    """The numbers in a text, in order."""
    return [one.value for one in find_numbers(to_text(value))]
