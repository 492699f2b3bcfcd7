"""Answer values in Python: one validation for the answers of models and for targets.

SVG has to be safe for a renderer: one well-formed element, nothing that runs, loads or expands.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from string import ascii_letters
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias, TypeGuard
from xml.parsers import expat

from mmrl.answer.language import ANSWER_LEAD
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
_LEAD = re.compile(ANSWER_LEAD + r"(?=\$|\\[(\[]|\\boxed)", re.IGNORECASE)
_DOLLARS = re.compile(r"^([+-]?)\$(?=[0-9.])")  # an amount, such as $5
# Escaped characters match too, so that \{ and \$ are passed over.
_BRACES = re.compile(r"\\.|[{}$]", re.DOTALL)
# Checkers recurse several times a level. This limit is the same in every process; Python's is not, since
# torch.compile raises it.
_MAX_JSON_DEPTH = 64
# Renderers recurse once a level, and take time that grows with the text.
_MAX_SVG_CHARS, _MAX_SVG_DEPTH = 500_000, 200
_FORBIDDEN_ELEMENTS = frozenset({"script", "foreignobject", "iframe", "embed", "object", "audio", "video", "handler"})
_EXTERNAL_REFERENCE = re.compile(r"@import|url\(\s*['\"]?\s*(?!#)[^)]", re.IGNORECASE)


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
            arguments = {}
            for key, argument in value.arguments.items():
                arguments[key] = convert(argument) if key in COORDINATE_KEYS else argument
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
    if isinstance(value, list | tuple):
        return [_convert_json_coordinates(inner, convert) for inner in value]
    if not isinstance(value, Mapping):
        return value
    converted: dict[str, object] = {}
    for key, inner in value.items():
        # Under one of these keys, anything but its count of numbers is not a coordinate.
        is_list = isinstance(inner, list | tuple) and len(inner) == COORDINATE_KEYS.get(key)
        if is_list and all(map(is_number, inner)):
            converted[key] = list(convert(inner))
        else:
            converted[key] = _convert_json_coordinates(inner, convert)
    return converted


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


def _validate_numbers(count: int, name: str, value: object, *, in_order: bool = False) -> tuple[float, ...]:
    """Return `count` numbers. With `in_order`, four are a box and two a span of time, neither inverted nor empty."""
    if not isinstance(value, list | tuple) or len(value) != count:
        raise ValueError(f"not {name}")
    for number in value:
        # True is an int to Python. NaN fails every comparison, so the bound refuses it too.
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not abs(number) <= _MAX_COORDINATE:
            raise ValueError(f"not {name}")
    numbers = tuple(map(float, value))
    if in_order and count == 4:
        x1, y1, x2, y2 = numbers
        # The area too, since it can underflow to 0 and would then be divided by.
        if not (x1 < x2 and y1 < y2 and (x2 - x1) * (y2 - y1) > 0.0):
            raise ValueError("inverted or empty box")
    elif in_order and not 0 <= numbers[0] < numbers[1]:
        raise ValueError("inverted, empty or negative span of time")
    return numbers


_validate_span = partial(_validate_numbers, 2, "a span of time", in_order=True)


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
    answer_type = AnswerType.BOX if key == "bbox_2d" else AnswerType.POINT
    if isinstance(value, Region):
        value = {key: value.coordinates, "label": value.label, "confidence": value.confidence}
    if not isinstance(value, Mapping):
        return Region(validate_value(answer_type, value))
    unknown = sorted(map(str, value.keys() - {key, "label", "confidence"}))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}")
    label, confidence = value.get("label", ""), value.get("confidence")
    if not isinstance(label, str):
        raise ValueError("a label that is not text")
    if confidence is not None and not (is_number(confidence) and 0 <= confidence <= 1):
        raise ValueError("a confidence outside 0 to 1")
    return Region(validate_value(answer_type, value.get(key)), label, confidence)


def _validate_items(validate_item: Callable[[object], Any], value: object) -> tuple[Any, ...]:
    return tuple(map(validate_item, _validate_list_type(value)))


def _validate_permutation(value: object) -> tuple[int, ...]:
    entries = _validate_list_type(value)
    # `type`, since True is an int to isinstance.
    if not entries or any(type(entry) is not int for entry in entries):
        raise ValueError("not a list of whole numbers")
    if sorted(entries) != list(range(1, len(entries) + 1)):
        raise ValueError(f"not each of 1 to {len(entries)} once")
    return tuple(entries)


def _validate_list(value: object) -> tuple[str, ...]:
    # A bare number in a list, such as a frame's, stands for its text.
    entries = [str(entry) if type(entry) is int else entry for entry in _validate_list_type(value)]
    if not all(isinstance(entry, str) and entry.strip() for entry in entries):
        raise ValueError("not a list of texts")
    return tuple(entries)


def _validate_action(value: object) -> Action:
    if isinstance(value, Action):
        value = {**value.arguments, "action": value.name}
    # The call of a tool that acts, as Qwen-VL is trained to write actions.
    if isinstance(value, Mapping) and value.keys() == {"name", "arguments"}:
        value = value["arguments"]
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
        raise ValueError("arguments that are not a mapping")
    for key, argument in arguments.items():
        count = COORDINATE_KEYS.get(key)
        if count:
            _validate_numbers(count, f"{count} numbers in {key!r}", argument)
    return Action(name, _validate_json(arguments))


def _validate_json(value: object) -> AnswerValue:
    """Return JSON of any shape but null, which is not an answer."""
    if value is None:
        raise ValueError("null")
    if is_nested_deeper(value, _MAX_JSON_DEPTH):
        raise ValueError(f"JSON of more than {_MAX_JSON_DEPTH} levels")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError("not JSON") from None
    return value


def is_nested_deeper(value: object, levels: int) -> bool:
    """Return True if lists and mappings in a value are nested more than `levels` deep; it recurses no deeper."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if not isinstance(value, list | tuple):
        return False
    return levels == 0 or any(is_nested_deeper(item, levels - 1) for item in value)


def _validate_latex(value: object) -> str:
    """Return one formula without its delimiters."""
    formula = _validate_text(value).strip()
    lead = _LEAD.match(formula)
    if lead:
        formula = formula[lead.end() :].removesuffix(".")
    for opening, closing in _DELIMITERS:
        if formula.startswith(opening) and formula.endswith(closing) and len(formula) >= len(opening + closing):
            formula = formula[len(opening) : len(formula) - len(closing)].strip()
    formula = _DOLLARS.sub(r"\1\\$", formula)
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


def _validate_svg(value: object) -> str:
    """Return the text of one <svg> element, stripped."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("not an SVG")
    text = value.strip()
    if len(text) > _MAX_SVG_CHARS:
        raise ValueError(f"an SVG of {len(text)} characters, at most {_MAX_SVG_CHARS} are read")
    parser = expat.ParserCreate(encoding="utf-8")
    checker = _SvgChecker()
    parser.StartElementHandler = checker.start_element
    parser.EndElementHandler = checker.end_element
    parser.CharacterDataHandler = checker.character_data
    # Only a doctype declares entities, which could expand without end or read files.
    parser.StartDoctypeDeclHandler = partial(_reject_svg, "a doctype")
    parser.ProcessingInstructionHandler = partial(_reject_svg, "a processing instruction")
    try:
        parser.Parse(text.encode(), True)
    except expat.ExpatError as error:
        raise ValueError(f"not well-formed ({expat.ErrorString(error.code)})") from None
    except UnicodeEncodeError:
        raise ValueError("text that is not Unicode") from None
    return text


class _SvgChecker:
    """Checks elements, attributes and style sheets as the parser reports them."""

    _depth = 0
    _style: list[str] | None = None  # text of the style sheet that is being read

    def start_element(self, name: str, attributes: dict[str, str]) -> None:
        # Renderers ignore case and namespace prefixes, so the check does, too.
        local_name = name.rpartition(":")[2].lower()
        self._depth += 1
        if self._depth == 1 and local_name != "svg":
            _reject_svg(f"a <{name}> where <svg> belongs")
        if self._depth > _MAX_SVG_DEPTH:
            _reject_svg(f"more than {_MAX_SVG_DEPTH} levels")
        if local_name in _FORBIDDEN_ELEMENTS:
            _reject_svg(f"a <{name}>")
        if local_name == "style":
            self._style = []
        for key, value in attributes.items():
            attribute = key.rpartition(":")[2].lower()
            if attribute.startswith("on"):
                _reject_svg(f"the event handler {key!r}")
            leads_out = attribute in ("href", "src") and not value.strip().startswith("#")
            if leads_out or _EXTERNAL_REFERENCE.search(value):
                _reject_svg("a reference that leads out of the drawing")

    def character_data(self, text: str) -> None:
        if self._style is not None:
            self._style.append(text)

    def end_element(self, name: str) -> None:
        self._depth -= 1
        # Checked at its end: the parser may report the text in pieces that split a reference.
        if self._style is not None and name.rpartition(":")[2].lower() == "style":
            if _EXTERNAL_REFERENCE.search("".join(self._style)):
                _reject_svg("a style sheet that loads another file")
            self._style = None


def _reject_svg(reason: str, *_event: object) -> NoReturn:
    raise ValueError(f"an SVG with {reason}")


_VALIDATORS: Mapping[AnswerType, Callable[[object], Any]] = MappingProxyType(
    {
        AnswerType.TEXT: _validate_text,
        AnswerType.CHOICE: _validate_choice,
        AnswerType.NUMBER: _validate_number,
        AnswerType.BOX: partial(_validate_numbers, 4, "a box", in_order=True),
        AnswerType.BOXES: partial(_validate_items, partial(validate_region, key="bbox_2d")),
        AnswerType.POINT: partial(_validate_numbers, 2, "a point"),
        AnswerType.POINTS: partial(_validate_items, partial(validate_region, key="point_2d")),
        AnswerType.SPAN: _validate_span,
        AnswerType.SPANS: partial(_validate_items, _validate_span),
        AnswerType.PERMUTATION: _validate_permutation,
        AnswerType.ACTION: _validate_action,
        AnswerType.LIST: _validate_list,
        AnswerType.JSON: _validate_json,
        AnswerType.LATEX: _validate_latex,
        AnswerType.SVG: _validate_svg,
        AnswerType.TOOL_CALL: _validate_tool_call,
    }
)
