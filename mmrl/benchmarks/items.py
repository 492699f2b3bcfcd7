"""What a benchmark asks, as scorers see it: the columns of an item file, checked; and responses, matched with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any, Final, Literal, get_args

from mmrl.answer import AnswerValue, validate_value
from mmrl.benchmarks.extraction.numbers import find_numbers
from mmrl.benchmarks.verdict import read_rows
from mmrl.types import AnswerType, CoordinateSystem, Size, UserError

ItemAnswerType = Literal["choice", "integer", "float", "list", "text", "count", "box", "boxes", "point"]
ITEM_ANSWER_TYPES: Final[tuple[str, ...]] = get_args(ItemAnswerType)
ITEM_COLUMNS: Final = (
    *("id", "question", "options", "answer", "answer_type"),
    *("precision", "unit", "frame", "image_size", "meta"),
)
"""The columns of canonical JSONL that scoring reads; only some questions need those after `answer_type`."""
_REQUIRED_COLUMNS: Final = ("id", "answer", "answer_type")
COORDINATE_TYPES: Final = ("box", "boxes", "point")
"""Answers with coordinates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One question and its right answer. The answer to a choice is the text of an option.

    `groups` are the values by which a report breaks results down, several for a question of several skills. Answers
    with coordinates are in `frame`, of a picture of `size`.
    """

    id: str
    answer_type: ItemAnswerType
    answer: Any
    question: str = ""
    options: tuple[str, ...] = ()
    precision: int | None = None
    unit: str | None = None
    coordinate_system: CoordinateSystem = CoordinateSystem.PX_ORIGINAL
    image_size: Size | None = None
    cluster: str = ""
    subsets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemResponse:
    """One response to an item. Coordinates in it are in `frame`, of a picture resized to `resized`."""

    id: str
    text: str
    response_index: int = 0
    finished: bool = True
    num_tokens: int | None = None
    coordinate_system: CoordinateSystem = CoordinateSystem.PX_ORIGINAL
    resized_size: Size | None = None


def parse_canonical_item(row: Mapping[str, Any]) -> Item:
    """An item of canonical JSONL.

    Raises:
        ValueError: a column is missing or says what cannot be.
    """
    if absent := [column for column in _REQUIRED_COLUMNS if column not in row]:
        raise ValueError(f"has no column {', '.join(map(repr, absent))}")
    kind = row["answer_type"]
    if kind not in ITEM_ANSWER_TYPES:
        raise ValueError(f"answer_type is {kind!r}, not one of {', '.join(ITEM_ANSWER_TYPES)}")
    if kind in COORDINATE_TYPES and "frame" not in row:
        raise ValueError(f"a {kind} needs the column 'frame': one of {', '.join(CoordinateSystem)}")
    meta = row.get("meta") or {}
    if not isinstance(meta, Mapping):
        raise ValueError(f"meta is {meta!r:.40}, not an object")
    options = parse_options(row.get("options"))
    return Item(
        id=parse_id(row["id"]),
        answer_type=kind,
        answer=parse_answer(kind, row["answer"], options),
        question=text_cell(row, "question") or "",
        options=options,
        precision=parse_precision(row.get("precision")),
        unit=text_cell(row, "unit"),
        coordinate_system=parse_coordinate_system(row.get("frame", CoordinateSystem.PX_ORIGINAL)),
        image_size=parse_size(row.get("image_size")),
        cluster=str(row.get("cluster") or row["id"]),
        subsets={key: subset_values(value) for key, value in meta.items() if not isinstance(value, Mapping | None)},
        meta=meta,
    )


def parse_answer(answer_type: ItemAnswerType, answer: object, options: tuple[str, ...]) -> AnswerValue:
    """The right answer in the form that scorers compare: coordinates checked, a choice as its text. A point is due
    anywhere in a box.

    Raises:
        ValueError: it is none of this kind.
    """
    match answer_type:
        case "choice":
            return answer_option(answer, options)
        case "box" | "point":
            return validate_value(AnswerType.BOX, answer)
        case "boxes":
            return validate_value(AnswerType.BOXES, answer)
        case "integer" | "float" | "count" if next(find_numbers(str(answer)), None) is None:
            raise ValueError(f"the answer {answer!r:.60} has no number")
        case "list" if not (_all_have_numbers(answer) if isinstance(answer, list) else any(find_numbers(str(answer)))):
            raise ValueError(f"the answer {answer!r:.60} is no list of numbers")
        case "text" if answer is None or answer in ("", [], {}):
            raise ValueError(f"the answer is {answer!r}: nothing could be right")
        case _:
            return answer


def _all_have_numbers(values: Sequence[object]) -> bool:
    return bool(values) and all(any(find_numbers(str(value))) for value in values)


def text_cell(row: Mapping[str, Any], column: str) -> str | None:
    """The text of a column, None where there is none.

    Raises:
        ValueError: it is no text.
    """
    value = row.get(column)
    if isinstance(value, float) and isnan(value):  # tables hold NaN for none
        return None
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{column} is {value!r:.40}, not text")
    return value


def parse_id(value: object) -> str:
    """An id, as text.

    Raises:
        ValueError: it is empty, or neither text nor a whole number.
    """
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(f"the id is {value!r:.40}, neither text nor a whole number")
    return str(value)


def parse_precision(value: object) -> int | None:
    """How many decimals; published tables hold them as floats, 2.0.

    Raises:
        ValueError: it is no whole number from 0 to 12.
    """
    if value is None or (isinstance(value, float) and isnan(value)):  # tables hold NaN for none
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value not in range(13):
        raise ValueError(f"precision is {value!r}, not a whole number of decimals from 0 to 12")
    return int(value)


def parse_options(value: object) -> tuple[str, ...]:
    """Options as a list of texts; at most one per letter.

    Raises:
        ValueError: they are anything else.
    """
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"options are {value!r:.60}, not a list of texts")
    if len(value) > 26:
        raise ValueError(f"{len(value)} options, there are 26 letters")
    return tuple(value)


def answer_option(answer: object, options: tuple[str, ...]) -> str:
    """The text of the right option, which the answer gives, or its letter.

    Raises:
        ValueError: it is none of the options.
    """
    if isinstance(answer, str) and answer in options:
        return answer
    place = ord(answer) - ord("A") if isinstance(answer, str) and len(answer) == 1 else -1
    if not 0 <= place < len(options):
        raise ValueError(
            f"the answer {answer!r:.60} is none of the options {', '.join(map(repr, options)) or '(none)'}"
        )
    return options[place]


def parse_coordinate_system(value: object) -> CoordinateSystem:
    """What coordinates are measured in.

    Raises:
        ValueError: it is none of the frames there are.
    """
    if value not in list(CoordinateSystem):
        raise ValueError(f"frame is {value!r:.40}, not one of {', '.join(CoordinateSystem)}")
    return CoordinateSystem(str(value))


def parse_size(value: object) -> Size | None:
    """Width and height.

    Raises:
        ValueError: they are not two positive whole numbers.
    """
    if value is None:
        return None
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or not all(isinstance(side, int) and side > 0 for side in value)
    ):
        raise ValueError(f"the size is {value!r:.40}, not [width, height]")
    return Size(*value)


def subset_values(value: object) -> tuple[str, ...]:
    """The groups that a cell of metadata puts an item in."""
    return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)


def read_items(path: Path, parse: Callable[[Mapping[str, Any]], Item]) -> dict[str, Item]:
    """The items of a file by id, in its order.

    Raises:
        UserError: a row cannot be parsed, an id stands twice, or there is none.
    """
    items: dict[str, Item] = {}
    for number, row in read_rows(path):
        try:
            item = parse(row)
        except ValueError as error:
            raise UserError(f"{path}:{number}: {error}") from error
        if item.id in items:
            raise UserError(f"{path}:{number}: the id {item.id!r} stands twice; give each question an id of its own")
        items[item.id] = item
    if not items:
        raise UserError(f"{path}: holds no items")
    return items


def read_responses(path: Path, items: Mapping[str, Item]) -> list[ItemResponse]:
    """The responses of a file: rows `{pid, response}`, where `sample`, `finish`, `tokens`, `frame`, `resized` may be.

    Other columns are left alone: published files have them.

    Raises:
        UserError: a row has no id or response, answers no item, or answers one twice with the same `sample`.
    """
    responses: dict[tuple[str, int], ItemResponse] = {}
    for number, row in read_rows(path):
        try:
            response = _parse_response(row)
        except ValueError as error:
            raise UserError(f"{path}:{number}: {error}") from error
        if response.id not in items:
            raise UserError(f"{path}:{number}: the id {response.id!r} is that of no item; are these the right items?")
        key = response.id, response.response_index
        if key in responses:
            raise UserError(
                f"{path}:{number}: a second response to {response.id!r}; several to one question need a column 'sample'"
            )
        responses[key] = response
    return list(responses.values())


def _parse_response(row: Mapping[str, Any]) -> ItemResponse:
    if absent := [column for column in ("pid", "response") if column not in row]:
        raise ValueError(f"has no column {', '.join(map(repr, absent))}; a response is {{'pid': .., 'response': ..}}")
    text, sample, tokens = row["response"], row.get("sample", 0), row.get("tokens")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"the response is {text!r:.40}, not text")
    if isinstance(sample, bool) or not isinstance(sample, int) or sample < 0:
        raise ValueError(f"sample is {sample!r:.40}, not a whole number from 0 on")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0):
        raise ValueError(f"tokens is {tokens!r:.40}, not how many there are")
    return ItemResponse(
        id=parse_id(row["pid"]),
        text=text or "",
        response_index=sample,
        finished=row.get("finish") != "length",
        num_tokens=tokens,
        coordinate_system=parse_coordinate_system(row.get("frame", CoordinateSystem.PX_ORIGINAL)),
        resized_size=parse_size(row.get("resized")),
    )


def missing_ids(items: Mapping[str, Item], responses: Iterable[ItemResponse]) -> list[str]:
    """Ids of the items without a response."""
    answered = {response.id for response in responses}
    return [id for id in items if id not in answered]
