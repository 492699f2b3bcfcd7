"""Answer values in Python: one validation for the answers of models and for targets."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from string import ascii_letters
from types import MappingProxyType
from typing import Any, TypeAlias, TypeGuard

from mmrl.answer.svg import check_svg
from mmrl.types import Action, AnswerType, Region

AnswerValue: TypeAlias = Any
"""Value in the form that `AnswerType` states for its type."""

COORDINATE_TYPES: frozenset[AnswerType] = frozenset(
    {AnswerType.BOX, AnswerType.BOXES, AnswerType.POINT, AnswerType.POINTS, AnswerType.ACTION}
)
"""Answer types that hold coordinates, and so need a coordinate system. Tool calls are left to their tools."""

POSSIBLE_COORDINATE_TYPES: frozenset[AnswerType] = COORDINATE_TYPES | {AnswerType.JSON}
"""Answer types that can hold coordinates; JSON does under `COORDINATE_KEYS`, at any depth."""

COORDINATE_KEYS: Mapping[str, int] = MappingProxyType({"coordinate": 2, "coordinate2": 2, "point_2d": 2, "bbox_2d": 4})
"""Keys whose values are coordinates, with the count of numbers of each."""

_MAX_FLOAT = sys.float_info.max
# Pixels or seconds; areas of such boxes are far from overflow.
_MAX_COORDINATE = 1e9
# Matching two lists takes time that grows with the cube of their length.
_MAX_LIST_ITEMS = 1000
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), (r"\boxed{", "}"))
_BRACES = re.compile(r"\\.|[{}$]", re.DOTALL)


def validate_value(answer_type: AnswerType, value: object) -> AnswerValue:
    """Return a value in the form that `AnswerType` states; JSON's lists serve as tuples, its mappings as regions.

    Raises:
        ValueError: the value is not of this type; the message leaves out the value.
    """
    return _VALIDATORS[answer_type](value)


def convert_coordinates(
    answer_type: AnswerType, value: AnswerValue, convert: Callable[[Sequence[float]], tuple[float, ...]]
) -> AnswerValue:
    """Return a validated value with its coordinates converted; `convert` takes and returns x, y, x, y, ..."""
    match answer_type:
        case AnswerType.BOX | AnswerType.POINT:
            return convert(value)
        case AnswerType.BOXES | AnswerType.POINTS:
            return tuple(region._replace(coordinates=convert(region.coordinates)) for region in value)
        case AnswerType.ACTION:
            arguments = dict(value.arguments)
            for key in arguments.keys() & COORDINATE_KEYS:
                arguments[key] = convert(arguments[key])
            return Action(value.name, arguments)
        case AnswerType.JSON:
            return _convert_json_coordinates(value, convert)
        case _:
            return value


def list_coordinates(answer_type: AnswerType, value: AnswerValue) -> list[Sequence[float]]:
    """Return the coordinates in a validated value, one entry for each box or point."""
    coordinates: list[Sequence[float]] = []

    def collect(numbers: Sequence[float]) -> tuple[float, ...]:
        coordinates.append(numbers)
        return tuple(numbers)

    convert_coordinates(answer_type, value, collect)
    return coordinates


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True for an int or float that is finite as a float; False for a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _MAX_FLOAT


def _convert_json_coordinates(value: object, convert: Callable[[Sequence[float]], tuple[float, ...]]) -> object:
    if isinstance(value, Mapping):
        converted: dict[str, object] = {}
        for key, inner in value.items():
            if _is_coordinate_list(inner, key):
                converted[key] = list(convert(inner))
            else:
                converted[key] = _convert_json_coordinates(inner, convert)
        return converted
    if isinstance(value, list | tuple):
        return [_convert_json_coordinates(inner, convert) for inner in value]
    return value


def _is_coordinate_list(value: object, key: str) -> TypeGuard[Sequence[float]]:
    return isinstance(value, list | tuple) and len(value) == COORDINATE_KEYS.get(key) and all(map(is_number, value))


def _validate_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not text")
    if not value.strip():
        raise ValueError("empty answer")
    return value


def _validate_choice(value: object) -> str:
    if not isinstance(value, str) or len(value) != 1 or value not in ascii_letters:
        raise ValueError("not one letter")
    return value.upper()


def _validate_number(value: object) -> int | float:
    if not is_number(value):
        raise ValueError("not a number")
    return value


def _validate_numbers(value: object, count: int, noun: str) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or len(value) != count:
        raise ValueError(f"not {noun}")
    if not all(is_number(number) and abs(number) <= _MAX_COORDINATE for number in value):
        raise ValueError(f"not {noun}")
    return tuple(map(float, value))


def _validate_box(value: object) -> tuple[float, ...]:
    x1, y1, x2, y2 = box = _validate_numbers(value, 4, "a box")
    if not (x1 < x2 and y1 < y2 and (x2 - x1) * (y2 - y1) > 0.0):
        raise ValueError("inverted or empty box")
    return box


def _validate_point(value: object) -> tuple[float, ...]:
    return _validate_numbers(value, 2, "a point")


def _validate_span(value: object) -> tuple[float, ...]:
    start, end = span = _validate_numbers(value, 2, "a span of time")
    if not 0 <= start < end:
        raise ValueError("inverted, empty or negative span of time")
    return span


def _validate_list_type(value: object) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError("not a list")
    if len(value) > _MAX_LIST_ITEMS:
        raise ValueError(f"a list of {len(value)}, at most {_MAX_LIST_ITEMS} are read")
    return value


def validate_region(value: object, key: str) -> Region:
    """Return a box (`key` is bbox_2d) or point (point_2d), given as coordinates or as a mapping that may add a label.

    Raises:
        ValueError: the value is neither.
    """
    validate = _validate_box if key == "bbox_2d" else _validate_point
    if isinstance(value, Region):
        value = {key: value.coordinates, "label": value.label, "confidence": value.confidence}
    if not isinstance(value, Mapping):
        return Region(validate(value))
    unknown = sorted(map(str, value.keys() - {key, "label", "confidence"}))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}")
    label, confidence = value.get("label", ""), value.get("confidence")
    if not isinstance(label, str):
        raise ValueError("a label that is not text")
    if confidence is not None and not (is_number(confidence) and 0 <= confidence <= 1):
        raise ValueError("a confidence outside 0 to 1")
    return Region(validate(value.get(key)), label, confidence)


def _validate_boxes(value: object) -> tuple[Region, ...]:
    return tuple(validate_region(entry, "bbox_2d") for entry in _validate_list_type(value))


def _validate_points(value: object) -> tuple[Region, ...]:
    return tuple(validate_region(entry, "point_2d") for entry in _validate_list_type(value))


def _validate_spans(value: object) -> tuple[tuple[float, ...], ...]:
    return tuple(map(_validate_span, _validate_list_type(value)))


def _validate_permutation(value: object) -> tuple[int, ...]:
    entries = _validate_list_type(value)
    if not entries or any(type(entry) is not int for entry in entries):
        raise ValueError("not a list of whole numbers")
    if sorted(entries) != list(range(1, len(entries) + 1)):
        raise ValueError(f"not each of 1 to {len(entries)} once")
    return tuple(entries)


def _validate_list(value: object) -> tuple[str, ...]:
    entries = [str(entry) if type(entry) is int else entry for entry in _validate_list_type(value)]
    if not all(isinstance(entry, str) and entry.strip() for entry in entries):
        raise ValueError("not a list of texts")
    return tuple(entries)


def _validate_action(value: object) -> Action:
    if isinstance(value, Action):
        value = {**value.arguments, "action": value.name}
    if not isinstance(value, Mapping) or "action" not in value:
        raise ValueError("not an action")
    return _build_action(value["action"], {key: argument for key, argument in value.items() if key != "action"})


def _validate_tool_call(value: object) -> Action:
    if isinstance(value, Action):
        value = {"name": value.name, "arguments": value.arguments}
    if not isinstance(value, Mapping) or value.keys() != {"name", "arguments"}:
        raise ValueError("not a tool call")
    return _build_action(value["name"], value["arguments"])


def _build_action(name: object, arguments: object) -> Action:
    if not isinstance(name, str) or not name.strip():
        raise ValueError("an action without a name")
    if not isinstance(arguments, Mapping):
        raise ValueError("arguments that are no mapping")
    for key in arguments.keys() & COORDINATE_KEYS:
        _validate_numbers(arguments[key], COORDINATE_KEYS[key], f"{COORDINATE_KEYS[key]} numbers in {key!r}")
    return Action(name, _validate_json(arguments))


def _validate_json(value: object) -> AnswerValue:
    """Return JSON of any shape but null, which is no answer."""
    if value is None:
        raise ValueError("null")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError("not JSON") from None
    return value


def _validate_latex(value: object) -> str:
    """Return one formula without its delimiters."""
    formula = _validate_text(value).strip()
    for opening, closing in _DELIMITERS:
        if formula.startswith(opening) and formula.endswith(closing) and len(formula) >= len(opening + closing):
            formula = formula[len(opening) : len(formula) - len(closing)].strip()
    depth = 0
    for match in _BRACES.finditer(formula):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
        if depth < 0 or match[0] == "$":
            raise ValueError("not one formula")
    if depth or not formula:
        raise ValueError("not one formula")
    return formula


_VALIDATORS: Mapping[AnswerType, Callable[[object], Any]] = MappingProxyType(
    {
        AnswerType.TEXT: _validate_text,
        AnswerType.CHOICE: _validate_choice,
        AnswerType.NUMBER: _validate_number,
        AnswerType.BOX: _validate_box,
        AnswerType.BOXES: _validate_boxes,
        AnswerType.POINT: _validate_point,
        AnswerType.POINTS: _validate_points,
        AnswerType.SPAN: _validate_span,
        AnswerType.SPANS: _validate_spans,
        AnswerType.PERMUTATION: _validate_permutation,
        AnswerType.ACTION: _validate_action,
        AnswerType.LIST: _validate_list,
        AnswerType.JSON: _validate_json,
        AnswerType.LATEX: _validate_latex,
        AnswerType.SVG: check_svg,
        AnswerType.TOOL_CALL: _validate_tool_call,
    }
)
