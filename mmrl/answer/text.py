"""How answers of each kind stand in text: reading, and the one canonical way of writing. Linear time, ASCII digits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from mmrl.answer.values import COORDINATES, Value, checked, reframed, region
from mmrl.types import Frame, Kind, Region, Target

FORMS: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.TEXT: "text",
        Kind.CHOICE: "letter",
        Kind.NUMBER: "number",
        Kind.BOX: "[x1, y1, x2, y2]",
        Kind.BOXES: '[{"bbox_2d": [x1, y1, x2, y2], "label": "name"}, ...]',
        Kind.POINT: "[x, y]",
        Kind.POINTS: '[{"point_2d": [x, y], "label": "name"}, ...]',
        Kind.SPAN: "[start, end]",
        Kind.SPANS: "[[start, end], ...]",
        Kind.PERMUTATION: "[3, 1, 2, ...]",
        Kind.ACTION: '{"action": "click", "coordinate": [x, y]}',
        Kind.LIST: '["text", ...]',
        Kind.JSON: "JSON",
        Kind.LATEX: "LaTeX",
        Kind.SVG: "<svg>...</svg>",
        Kind.TOOL_CALL: '{"name": "tool", "arguments": {...}}',
    }
)
"""What the instruction puts where the answer belongs."""

WORDS = frozenset({Kind.TEXT, Kind.CHOICE, Kind.LATEX, Kind.SVG})
"""Kinds whose text is no JSON."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+|(?=\.[0-9]))(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?")
_CHOICE = re.compile(r"\(([A-Za-z])\)|([A-Za-z])[.)]?")
_COORDINATE = r"([+-]?[0-9]{1,9}(?:\.[0-9]*)?)"
_ROWS = {count: r"\s*" + r"(?:\s*,\s*|\s+)".join([_COORDINATE] * count) + r"\s*" for count in (2, 4)}
_TUPLES = MappingProxyType({count: re.compile(rf"\[{row}\]|\({row}\)") for count, row in _ROWS.items()})
_AS_JSON = json.JSONEncoder(ensure_ascii=False)
_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*)</tool_call>", re.DOTALL)

_OBJECT = ("{", "```")
_LONGEST_NUMBER = 40
_LONGEST_TUPLE = 200


def read(kind: Kind, text: str) -> Value:
    """The value that `text`, stripped and not empty, stands for; see `Kind`.

    Raises:
        ValueError: it stands for none of this kind.
    """
    reader = _READERS.get(kind, parse_json)
    return checked(kind, reader(text))


def parse_json(text: str) -> Value:
    """JSON as the standard has it, alone or in a ```json fence; nothing twice in one object, no NaN, no infinity.

    Raises:
        ValueError: it is anything else.
    """
    fenced = _FENCE.fullmatch(text.strip())
    try:
        return json.loads(
            fenced[1] if fenced else text,
            object_pairs_hook=_object,
            parse_constant=_not_json,
            parse_float=_finite,
        )
    except json.JSONDecodeError:
        raise ValueError("not JSON") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def written(target: Target) -> str:
    """A target as it stands in a demonstration: numbers without a trailing .0, coordinates rounded to whole units.

    Fractions of width and height keep three decimals, seconds two.

    Raises:
        ValueError: the value is none of its kind.
    """
    value = checked(target.kind, target.value)
    if target.kind in WORDS:
        return str(value)
    digits = 3 if target.frame is Frame.NORM_1 else None
    if target.kind is Kind.JSON and target.frame is not None:
        value = reframed(Kind.JSON, value, lambda place: tuple(_rounded(place, digits)))
    return _AS_JSON.encode(_plain(target.kind, value, digits))


def _plain(kind: Kind, value: Value, digits: int | None) -> object:
    """A checked value as JSON has it."""
    plain: object = value
    match kind:
        case Kind.NUMBER:
            plain = _whole(value)
        case Kind.BOX | Kind.POINT:
            plain = _rounded(value, digits)
        case Kind.BOXES | Kind.POINTS:
            plain = [_entry(entry, "bbox_2d" if kind is Kind.BOXES else "point_2d", digits) for entry in value]
        case Kind.SPAN:
            plain = _rounded(value, 2)
        case Kind.SPANS:
            plain = [_rounded(span, 2) for span in value]
        case Kind.ACTION:
            plain = {"action": value.name, **_arguments(value.arguments, digits)}
        case Kind.TOOL_CALL:
            plain = {"name": value.name, "arguments": _arguments(value.arguments, digits)}
    return plain


def _number(text: str) -> int | float:
    if len(text) > _LONGEST_NUMBER or not _NUMBER.fullmatch(text):
        raise ValueError("not a number")
    digits = text.replace(",", "")
    if digits.lstrip("+-").isdigit():
        return int(digits)
    return _finite(digits)


def _choice(text: str) -> str:
    match = _CHOICE.fullmatch(text) if len(text) <= len("(B)") else None
    if not match:
        raise ValueError("not one letter")
    return (match[1] or match[2]).upper()


def _box(text: str) -> object:
    return _keyed(text, "bbox_2d") if text.startswith(_OBJECT) else _tuple(text, 4, "not a box")


def _point(text: str) -> object:
    return _keyed(text, "point_2d") if text.startswith(_OBJECT) else _tuple(text, 2, "not a point")


def _keyed(text: str, key: str) -> object:
    """The coordinates in the JSON object that Qwen-VL models are trained to write."""
    return region(parse_json(text), key).coordinates


def _span(text: str) -> object:
    return _tuple(text, 2, "not a span of time")


def _tool_call(text: str) -> object:
    call = _CALL.fullmatch(text)
    return parse_json(call[1] if call else text)


def _tuple(text: str, count: int, complaint: str) -> tuple[float, ...]:
    match = _TUPLES[count].fullmatch(text) if len(text) <= _LONGEST_TUPLE else None
    if not match:
        raise ValueError(complaint)
    return tuple(float(number) for number in match.groups() if number is not None)


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key that stands twice in one object")
    return found


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError("number too large")
    return value


def _not_json(word: str) -> NoReturn:
    raise ValueError(f"{word} in JSON")


def _rounded(values: Sequence[float], digits: int | None) -> list[int | float]:
    return [_whole(round(value, digits)) for value in values]


def _entry(entry: Region, key: str, digits: int | None) -> dict[str, Any]:
    label = {"label": entry.label} if entry.label else {}
    confidence = {} if entry.confidence is None else {"confidence": entry.confidence}
    return {key: _rounded(entry.coordinates, digits), **label, **confidence}


def _arguments(arguments: Mapping[str, Any], digits: int | None) -> dict[str, Any]:
    return {key: _rounded(value, digits) if key in COORDINATES else value for key, value in arguments.items()}


def _whole(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


_READERS: Mapping[Kind, Callable[[str], object]] = MappingProxyType(
    {
        **dict.fromkeys((Kind.TEXT, Kind.LATEX, Kind.SVG), str),
        Kind.CHOICE: _choice,
        Kind.NUMBER: _number,
        Kind.BOX: _box,
        Kind.POINT: _point,
        Kind.SPAN: _span,
        Kind.TOOL_CALL: _tool_call,
    }
)
