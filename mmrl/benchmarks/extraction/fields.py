"""Answers with several fields: the JSON object, or the Python literal, that a text writes."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

# Characters of a field that are read; parsing takes more than linear time in some literals.
MAX_FIELD_CHARS: Final = 20_000


def select_fields(text: str, names: Sequence[str]) -> Mapping[str, Any]:
    """Return the value of each field in the JSON object of a text.

    A single field, or every field of a text without an object, is the whole text; another field that the object lacks
    is empty.
    """
    fields = parse_fields(text)
    fallback = "" if fields and len(names) > 1 else text
    return {name: fields.get(name, fallback) for name in names}


def parse_fields(text: str) -> Mapping[str, Any]:
    """Return the fields of the JSON object or Python dict in a text; empty when there is none."""
    value = parse_written_value(text[text.find("{") : text.rfind("}") + 1])
    return value if isinstance(value, Mapping) else {}


def parse_written_value(text: str) -> object:
    """Return the value that a text writes as JSON or as a Python literal, or the text itself."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text.strip()[:MAX_FIELD_CHARS])
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return text
