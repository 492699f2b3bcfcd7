"""What an answer of each kind is in Python: one check for parsed answers and for right ones alike."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from string import ascii_letters
from types import MappingProxyType
from typing import Any, TypeAlias, TypeGuard

from mmrl.answer.svg import check_svg
from mmrl.types import Action, Kind, Region

Value: TypeAlias = Any
"""What `Kind` says, by kind."""

FRAMED: frozenset[Kind] = frozenset({Kind.BOX, Kind.BOXES, Kind.POINT, Kind.POINTS, Kind.ACTION})
"""Kinds that hold coordinates, and so need a frame. What a tool's arguments mean is the tool's affair."""

MAY_BE_FRAMED: frozenset[Kind] = FRAMED | {Kind.JSON}
"""Kinds that can hold coordinates: JSON under the keys of `COORDINATES`, wherever they stand in it."""

COORDINATES: Mapping[str, int] = MappingProxyType({"coordinate": 2, "coordinate2": 2, "point_2d": 2, "bbox_2d": 4})
"""Arguments that are coordinates, and how many numbers each has."""

_MOST_OF_A_FLOAT = sys.float_info.max
_LARGEST = 1e9  # pixels or seconds; far from overflow when multiplied
_MOST = 1000  # entries of a list: what compares two lists takes time that grows with the cube
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), (r"\boxed{", "}"))
_BRACES = re.compile(r"\\.|[{}$]", re.DOTALL)


def checked(kind: Kind, value: object) -> Value:
    """`value` in the form that `Kind` states, made of what JSON gives: lists for tuples, mappings for regions.

    Raises:
        ValueError: it is none of this kind; the message says what is wrong and leaves out the value.
    """
    return _CHECKS[kind](value)


def reframed(kind: Kind, value: Value, convert: Callable[[Sequence[float]], tuple[float, ...]]) -> Value:
    """A checked value with every coordinate in it put through `convert`, which takes x, y, x, y, ..."""
    match kind:
        case Kind.BOX | Kind.POINT:
            return convert(value)
        case Kind.BOXES | Kind.POINTS:
            return tuple(region._replace(coordinates=convert(region.coordinates)) for region in value)
        case Kind.ACTION:
            arguments = value.arguments.items()
            return Action(value.name, {key: convert(v) if key in COORDINATES else v for key, v in arguments})
        case Kind.JSON:
            return _reframed_json(value, convert)
        case _:
            return value


def places(kind: Kind, value: Value) -> list[Sequence[float]]:
    """The coordinates in a checked value, one entry for each box or point."""
    found: list[Sequence[float]] = []

    def note(place: Sequence[float]) -> tuple[float, ...]:
        found.append(place)
        return tuple(place)

    reframed(kind, value, note)
    return found


def is_number(value: object) -> TypeGuard[int | float]:
    """An int or float that a float can hold, finite; no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _MOST_OF_A_FLOAT


def _reframed_json(value: object, convert: Callable[[Sequence[float]], tuple[float, ...]]) -> object:
    if isinstance(value, Mapping):
        return {
            key: list(convert(inner)) if _is_place(key, inner) else _reframed_json(inner, convert)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_reframed_json(inner, convert) for inner in value]
    return value


def _is_place(key: str, value: object) -> TypeGuard[Sequence[float]]:
    return isinstance(value, list | tuple) and len(value) == COORDINATES.get(key) and all(map(is_number, value))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not text")
    if not value.strip():
        raise ValueError("empty answer")
    return value


def _choice(value: object) -> str:
    if not isinstance(value, str) or len(value) != 1 or value not in ascii_letters:
        raise ValueError("not one letter")
    return value.upper()


def _number(value: object) -> int | float:
    if not is_number(value):
        raise ValueError("not a number")
    return value


def _numbers(value: object, count: int, what: str) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or len(value) != count:
        raise ValueError(f"not {what}")
    if not all(is_number(number) and abs(number) <= _LARGEST for number in value):
        raise ValueError(f"not {what}")
    return tuple(map(float, value))


def _box(value: object) -> tuple[float, ...]:
    x1, y1, x2, y2 = box = _numbers(value, 4, "a box")
    if not (x1 < x2 and y1 < y2 and (x2 - x1) * (y2 - y1) > 0.0):
        raise ValueError("inverted or empty box")
    return box


def _point(value: object) -> tuple[float, ...]:
    return _numbers(value, 2, "a point")


def _span(value: object) -> tuple[float, ...]:
    start, end = span = _numbers(value, 2, "a span of time")
    if not 0 <= start < end:
        raise ValueError("inverted, empty or negative span of time")
    return span


def _entries(value: object) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError("not a list")
    if len(value) > _MOST:
        raise ValueError(f"a list of {len(value)}, at most {_MOST} are read")
    return value


def region(value: object, key: str) -> Region:
    """One box (`key` is bbox_2d) or point (point_2d): its coordinates alone, or a mapping that may add a label.

    Raises:
        ValueError: it is neither.
    """
    check = _box if key == "bbox_2d" else _point
    if isinstance(value, Region):
        value = {key: value.coordinates, "label": value.label, "confidence": value.confidence}
    if not isinstance(value, Mapping):
        return Region(check(value))
    if unknown := sorted(map(str, value.keys() - {key, "label", "confidence"})):
        raise ValueError(f"unknown key {unknown[0]!r}")
    label, confidence = value.get("label", ""), value.get("confidence")
    if not isinstance(label, str):
        raise ValueError("a label that is not text")
    if confidence is not None and not (is_number(confidence) and 0 <= confidence <= 1):
        raise ValueError("a confidence outside 0 to 1")
    return Region(check(value.get(key)), label, confidence)


def _permutation(value: object) -> tuple[int, ...]:
    entries = _entries(value)
    if not entries or any(type(entry) is not int for entry in entries):
        raise ValueError("not a list of whole numbers")
    if sorted(entries) != list(range(1, len(entries) + 1)):
        raise ValueError(f"not each of 1 to {len(entries)} once")
    return tuple(entries)


def _list(value: object) -> tuple[str, ...]:
    entries = [str(entry) if type(entry) is int else entry for entry in _entries(value)]
    if not all(isinstance(entry, str) and entry.strip() for entry in entries):
        raise ValueError("not a list of texts")
    return tuple(entries)


def _action(value: object) -> Action:
    if isinstance(value, Action):
        value = {**value.arguments, "action": value.name}
    if not isinstance(value, Mapping) or "action" not in value:
        raise ValueError("not an action")
    return _named(value["action"], {key: v for key, v in value.items() if key != "action"})


def _tool_call(value: object) -> Action:
    if isinstance(value, Action):
        value = {"name": value.name, "arguments": value.arguments}
    if not isinstance(value, Mapping) or value.keys() != {"name", "arguments"}:
        raise ValueError("not a tool call")
    return _named(value["name"], value["arguments"])


def _named(name: object, arguments: object) -> Action:
    if not isinstance(name, str) or not name.strip():
        raise ValueError("an action without a name")
    if not isinstance(arguments, Mapping):
        raise ValueError("arguments that are no mapping")
    for key in arguments.keys() & COORDINATES:
        _numbers(arguments[key], COORDINATES[key], f"{COORDINATES[key]} numbers in {key!r}")
    return Action(name, _json(arguments))


def _json(value: object) -> Value:
    """JSON of any shape; null alone would say nothing."""
    if value is None:
        raise ValueError("null")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError("not JSON") from None
    return value


def _latex(value: object) -> str:
    """One formula, freed of what encloses it."""
    formula = _text(value).strip()
    for opening, closing in _DELIMITERS:
        if formula.startswith(opening) and formula.endswith(closing) and len(formula) >= len(opening + closing):
            formula = formula[len(opening) : len(formula) - len(closing)].strip()
    depth = 0
    for match in _BRACES.finditer(formula):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth < 0 or match[0] == "$":
            raise ValueError("not one formula")
    if depth or not formula:
        raise ValueError("not one formula")
    return formula


_CHECKS: Mapping[Kind, Callable[[object], Any]] = MappingProxyType(
    {
        Kind.TEXT: _text,
        Kind.CHOICE: _choice,
        Kind.NUMBER: _number,
        Kind.BOX: _box,
        Kind.BOXES: lambda value: tuple(region(entry, "bbox_2d") for entry in _entries(value)),
        Kind.POINT: _point,
        Kind.POINTS: lambda value: tuple(region(entry, "point_2d") for entry in _entries(value)),
        Kind.SPAN: _span,
        Kind.SPANS: lambda value: tuple(_span(entry) for entry in _entries(value)),
        Kind.PERMUTATION: _permutation,
        Kind.ACTION: _action,
        Kind.LIST: _list,
        Kind.JSON: _json,
        Kind.LATEX: _latex,
        Kind.SVG: check_svg,
        Kind.TOOL_CALL: _tool_call,
    }
)
