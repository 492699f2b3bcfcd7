"""Reading and writing of answers of each type as text. Reading takes linear time and accepts only ASCII digits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

from mmrl.answer.values import AnswerValue, convert_coordinates, validate_region, validate_value
from mmrl.types import AnswerType, CoordinateSystem, Target

ANSWER_PLACEHOLDERS: Mapping[AnswerType, str] = MappingProxyType(
    {
        AnswerType.TEXT: "text",
        AnswerType.CHOICE: "letter",
        AnswerType.NUMBER: "number",
        AnswerType.BOX: "[x1, y1, x2, y2]",
        AnswerType.BOXES: '[{"bbox_2d": [x1, y1, x2, y2], "label": "name"}, ...]',
        AnswerType.POINT: "[x, y]",
        AnswerType.POINTS: '[{"point_2d": [x, y], "label": "name"}, ...]',
        AnswerType.SPAN: "[start, end]",
        AnswerType.SPANS: "[[start, end], ...]",
        AnswerType.PERMUTATION: "[3, 1, 2, ...]",
        AnswerType.ACTION: '{"action": "click", "coordinate": [x, y]}',
        AnswerType.LIST: '["text", ...]',
        AnswerType.JSON: "JSON",
        AnswerType.LATEX: "LaTeX",
        AnswerType.SVG: "<svg>...</svg>",
        AnswerType.TOOL_CALL: '{"name": "tool", "arguments": {...}}',
    }
)
"""Placeholder of the answer in the instruction, by answer type."""

NON_JSON_TYPES = frozenset({AnswerType.TEXT, AnswerType.CHOICE, AnswerType.LATEX, AnswerType.SVG})
"""Answer types whose text is not JSON."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+|(?=\.[0-9]))(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?")
_CHOICE = re.compile(r"\(([A-Za-z])\)|([A-Za-z])[.)]?")
_COORDINATE = r"([+-]?[0-9]{1,9}(?:\.[0-9]*)?)"
_ROWS = {count: r"\s*" + r"(?:\s*,\s*|\s+)".join([_COORDINATE] * count) + r"\s*" for count in (2, 4)}
_CORNERS = rf"|\({_ROWS[2]}\)\s*,\s*\({_ROWS[2]}\)"  # (x1,y1),(x2,y2)
_TUPLES = MappingProxyType(
    {count: re.compile(rf"\[{row}\]|\({row}\){_CORNERS if count == 4 else ''}") for count, row in _ROWS.items()}
)
_BOX_TOKENS = re.compile(r"(?:<\|object_ref_start\|>[^<]*<\|object_ref_end\|>)?<\|box_start\|>([^<]*)<\|box_end\|>")
_JSON_REGION = re.compile(r"```|\{|\[\s*[\[{]|<points ")
_POINTS_TAG = re.compile(r'<points((?: [xy][0-9]{1,4}="[0-9.]{1,20}")+)(?: alt="([^"<>]*)")?>[^<>]*</points>')
_POINTS_ATTRIBUTE = re.compile(r'([xy][0-9]+)="([0-9.]+)"')
_JSON_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL | re.IGNORECASE)
_TOOL_CALL_TAGS = re.compile(r"<tool_call>(.*)</tool_call>", re.DOTALL)
_XML_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*)</function>", re.DOTALL)
_XML_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?", re.DOTALL)

# Longer texts are refused before a pattern runs over them.
_MAX_NUMBER_CHARS, _MAX_TUPLE_CHARS = 40, 200


def parse_answer_value(answer_type: AnswerType, text: str) -> AnswerValue:
    """Return the value of an answer's text, stripped and not empty, in the form that `AnswerType` states.

    Raises:
        ValueError: the text is not of this type.
    """
    parse = _PARSERS.get(answer_type, parse_json)
    return validate_value(answer_type, parse(text))


def parse_json(text: str) -> AnswerValue:
    """Return the value of standard JSON, alone or in a ```json fence.

    Raises:
        ValueError: the text is not JSON, has a key twice in one object, a NaN or an infinity, or is nested too deeply.
    """
    fenced = _JSON_FENCE.fullmatch(text.strip())
    try:
        return json.loads(
            fenced[1] if fenced else text,
            object_pairs_hook=_reject_duplicate_keys,
            parse_constant=_reject_constant,
            parse_float=_parse_finite_float,
        )
    except json.JSONDecodeError:
        raise ValueError("not JSON") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def format_target(target: Target) -> str:
    """Return a target as a demonstration writes it: numbers without a trailing .0, coordinates as whole numbers.

    Fractions of width and height keep three decimals, seconds two.

    Raises:
        ValueError: the value is not of the target's type.
    """
    value = validate_value(target.answer_type, target.value)
    if target.answer_type in NON_JSON_TYPES:
        return str(value)
    digits = 3 if target.coordinate_system is CoordinateSystem.NORM_1 else None
    round_coordinates = partial(_round_values, digits=digits)
    plain: object = value
    match target.answer_type:
        case AnswerType.NUMBER:
            plain = _to_int_if_whole(value)
        case AnswerType.BOX | AnswerType.POINT:
            plain = round_coordinates(value)
        case AnswerType.BOXES | AnswerType.POINTS:
            key = "bbox_2d" if target.answer_type is AnswerType.BOXES else "point_2d"
            regions = []
            for region in value:
                label = {"label": region.label} if region.label else {}
                confidence = {} if region.confidence is None else {"confidence": region.confidence}
                regions.append({key: round_coordinates(region.coordinates), **label, **confidence})
            plain = regions
        case AnswerType.SPAN:
            plain = _round_values(value, 2)
        case AnswerType.SPANS:
            plain = [_round_values(span, 2) for span in value]
        case AnswerType.ACTION | AnswerType.TOOL_CALL:
            name, arguments = convert_coordinates(AnswerType.ACTION, value, round_coordinates)
            is_action = target.answer_type is AnswerType.ACTION
            plain = {"action": name, **arguments} if is_action else {"name": name, "arguments": arguments}
        case AnswerType.JSON if target.coordinate_system is not None:
            plain = convert_coordinates(AnswerType.JSON, value, round_coordinates)
    return json.dumps(plain, ensure_ascii=False)


def _parse_number(text: str) -> int | float:
    text = text.replace("\u2212", "-")  # the minus sign of typesetters
    if len(text) > _MAX_NUMBER_CHARS or not _NUMBER.fullmatch(text):
        raise ValueError("not a number")
    digits = text.replace(",", "")
    if digits.lstrip("+-").isdigit():
        return int(digits)
    return _parse_finite_float(digits)


def _parse_choice(text: str) -> str:
    match = _CHOICE.fullmatch(text) if len(text) <= len("(B)") else None
    if not match:
        raise ValueError("not one letter")
    return (match[1] or match[2]).upper()


def _parse_tool_call(text: str) -> object:
    tagged = _TOOL_CALL_TAGS.fullmatch(text)
    body = tagged[1] if tagged else text
    function = _XML_FUNCTION.fullmatch(body.strip())
    return parse_json(body) if function is None else _parse_xml_call(function[1], function[2])


def _parse_xml_call(name: str, body: str) -> object:
    """Return a call as Qwen3.5 is trained to write it: a tag for the function and one for each of its parameters."""
    *parts, rest = body.split("</parameter>")
    if rest.strip():
        raise ValueError("text after the parameters of the call")
    arguments: list[tuple[str, object]] = []
    for part in parts:
        match = _XML_PARAMETER.fullmatch(part)
        if match is None:
            raise ValueError("text outside the parameters of the call")
        parameter, text = match.groups()
        # The format has no types: what reads as JSON is JSON, and everything else is text.
        try:
            arguments.append((parameter, parse_json(text)))
        except ValueError:
            arguments.append((parameter, text))
    return {"name": name, "arguments": _reject_duplicate_keys(arguments)}


def _parse_points(text: str) -> object:
    """Return the points of JSON, or of <points x1="10" y1="20" alt="label">..</points>, as Qwen2.5-VL writes them."""
    tag = _POINTS_TAG.fullmatch(text)
    if tag is None:
        return parse_json(text)
    numbers = _reject_duplicate_keys(_POINTS_ATTRIBUTE.findall(tag[1]))
    names = [(f"x{place}", f"y{place}") for place in range(1, len(numbers) // 2 + 1)]
    if {*numbers} != {name for pair in names for name in pair}:
        raise ValueError("points without x1, y1, x2, y2, ..")
    return [{"point_2d": [float(numbers[x]), float(numbers[y])], "label": tag[2] or ""} for x, y in names]


def _parse_coordinates(text: str, count: int, problem: str, key: str = "") -> tuple[float, ...]:
    """Return the numbers of "[x, y, ..]" or "(x, y, ..)", `count` of them."""
    # As Qwen2-VL is trained to write: <|box_start|>(1,2),(3,4)<|box_end|>.
    tokens = _BOX_TOKENS.fullmatch(text) if key and text.startswith("<|") else None
    text = tokens[1] if tokens else text
    # The JSON that Qwen-VL models are trained to write: {"bbox_2d": [1, 2, 3, 4]}, or a list of one such object or box.
    if key and _JSON_REGION.match(text):
        region = _parse_points(text)
        if isinstance(region, list) and region and isinstance(region[0], list | dict):
            if len(region) > 1:
                raise ValueError(f"{len(region)} regions where one is asked for")
            region = region[0]
        return validate_region(region, key).coordinates
    fenced = _JSON_FENCE.fullmatch(text)
    text = fenced[1].strip() if fenced else text
    match = _TUPLES[count].fullmatch(text) if len(text) <= _MAX_TUPLE_CHARS else None
    if not match:
        raise ValueError(problem)
    return tuple(float(number) for number in match.groups() if number is not None)


def _reject_duplicate_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    # json keeps the last of two values, so an answer could show one and be scored by the other.
    if len(mapping) < len(pairs):
        raise ValueError("a key that appears twice in one object")
    return mapping


def _parse_finite_float(digits: str) -> float:
    value = float(digits)
    # float("1e999") is infinite rather than an error.
    if value in (float("inf"), float("-inf")):
        raise ValueError("number too large")
    return value


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} in JSON")


def _round_values(values: Sequence[float], digits: int | None) -> tuple[int | float, ...]:
    return tuple(_to_int_if_whole(round(value, digits)) for value in values)


def _to_int_if_whole(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


_PARSERS: Mapping[AnswerType, Callable[[str], object]] = MappingProxyType(
    {
        **dict.fromkeys((AnswerType.TEXT, AnswerType.LATEX, AnswerType.SVG), str),
        AnswerType.CHOICE: _parse_choice,
        AnswerType.NUMBER: _parse_number,
        AnswerType.BOX: partial(_parse_coordinates, count=4, problem="not a box", key="bbox_2d"),
        AnswerType.POINT: partial(_parse_coordinates, count=2, problem="not a point", key="point_2d"),
        AnswerType.POINTS: _parse_points,
        AnswerType.SPAN: partial(_parse_coordinates, count=2, problem="not a span of time"),
        AnswerType.TOOL_CALL: _parse_tool_call,
    }
)
