"""Items, which hold what scoring needs of a question, and responses to them: both as rows of JSONL files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Final, Literal, get_args

from mmrl.answer import AnswerValue, validate_value
from mmrl.benchmarks.extraction.numbers import find_numbers
from mmrl.benchmarks.verdict import read_rows
from mmrl.types import AnswerType, CoordinateSystem, Size, UserError

ItemAnswerType = Literal["choice", "integer", "float", "list", "text", "count", "box", "boxes", "point"]
ITEM_ANSWER_TYPES: Final[tuple[str, ...]] = get_args(ItemAnswerType)
COORDINATE_TYPES: Final = ("box", "boxes", "point")
_REQUIRED_COLUMNS: Final = ("id", "answer", "answer_type")
LETTERS: Final = tuple(ascii_uppercase)  # of options, in order
_MAX_DECIMALS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A question as scoring sees it."""

    id: str  # unique within the benchmark
    answer_type: ItemAnswerType  # decides how an answer is found and compared
    answer: Any
    """The correct answer: the letter of an option, a number, a text, a list of accepted ones, or checked coordinates.

    An option is its place, never its text, since options may be letters themselves, or equal.
    """
    question: str = ""  # text of the question; extraction tells a number of the question from the answer by it
    options: tuple[str, ...] = ()  # texts of the options, the first is A; empty for other questions
    precision: int | None = None  # decimals to which numbers are compared; None compares them exactly
    unit: str | None = None  # unit of a number
    coordinate_system: CoordinateSystem = CoordinateSystem.PX_ORIGINAL
    """Coordinate system of the answer, where it has coordinates."""
    image_size: Size | None = None  # width and height of the image in pixels; None when the file does not say it
    cluster: str = ""  # items of one cluster share their image, so that intervals resample them together
    subsets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Subsets by the column that makes them; an item may be in several, such as those of its skills."""
    meta: Mapping[str, Any] = field(default_factory=dict)  # anything else that the benchmark's own rule needs

    @property
    def accepted_answers(self) -> list[Any]:
        """Every correct answer, for items that accept several."""
        return self.answer if isinstance(self.answer, list) else [self.answer]

    @property
    def answer_text(self) -> str:
        """The answer as text; for a choice the text of the correct option."""
        if self.answer_type != "choice":
            return str(self.answer)
        return self.options[LETTERS.index(self.accepted_answers[0])]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemResponse:
    """A response to an item as scoring sees it."""

    id: str  # id of the item
    text: str  # everything the model wrote
    response_index: int = 0  # number of the response among those to the same item, from 0
    finished: bool = True  # False when the response was cut off by the limit of tokens
    num_tokens: int | None = None  # length in tokens; None when unknown
    coordinate_system: CoordinateSystem = CoordinateSystem.PX_ORIGINAL  # coordinate system of coordinates in the text
    resized_size: Size | None = None  # width and height in pixels of the image as the model saw it; None when unknown


def parse_canonical_item(row: Mapping[str, Any]) -> Item:
    """Return the item of a row of canonical JSONL.

    Raises:
        ValueError: a column is missing or holds an impossible value.
    """
    absent = [column for column in _REQUIRED_COLUMNS if column not in row]
    if absent:
        raise ValueError(f"has no column {', '.join(map(repr, absent))}")
    answer_type = row["answer_type"]
    if answer_type not in ITEM_ANSWER_TYPES:
        raise ValueError(f"answer_type is {answer_type!r}, not one of {', '.join(ITEM_ANSWER_TYPES)}")
    if answer_type in COORDINATE_TYPES and "frame" not in row:
        raise ValueError(f"a {answer_type} needs the column 'frame': one of {', '.join(CoordinateSystem)}")
    meta = object_cell(row, "meta")
    options = parse_options(row.get("options"))
    return Item(
        id=parse_id(row["id"]),
        answer_type=answer_type,
        answer=parse_answer(answer_type, row["answer"], options),
        question=text_cell(row, "question") or "",
        options=options,
        precision=parse_precision(row.get("precision")),
        unit=text_cell(row, "unit"),
        coordinate_system=_parse_coordinate_system(row.get("frame", CoordinateSystem.PX_ORIGINAL)),
        image_size=_parse_size(row.get("image_size")),
        cluster=str(row.get("cluster") or row["id"]),
        subsets={key: subset_values(value) for key, value in meta.items() if not isinstance(value, Mapping | None)},
        meta=meta,
    )


def parse_answer(answer_type: ItemAnswerType, answer: object, options: tuple[str, ...]) -> AnswerValue:
    """Return the correct answer in the form that scoring compares: checked coordinates, the letter of an option.

    For a choice a letter of one of the options is that letter; any other text is that of an option.

    Raises:
        ValueError: the answer does not fit its type.
    """
    match answer_type:
        case "choice":
            letters = answer if isinstance(answer, list) and answer else [answer]
            return answer if {*map(str, letters)} <= {*LETTERS[: len(options)]} else find_option(answer, options)
        case "box" | "point":
            # The answer to a point question is a box: any point in it is correct.
            return validate_value(AnswerType.BOX, answer)
        case "boxes":
            return validate_value(AnswerType.BOXES, answer)
        case "integer" | "float" | "count" if next(find_numbers(str(answer)), None) is None:
            raise ValueError(f"the answer {answer!r:.60} has no number")
        case "list":
            entries = answer if isinstance(answer, list) else [answer]
            if not entries or not all(any(find_numbers(str(entry))) for entry in entries):
                raise ValueError(f"the answer {answer!r:.60} is not a list of numbers")
            return answer
        case "text" if answer is None or answer in ("", [], {}):
            raise ValueError(f"the answer is {answer!r}: no response could be correct")
        case _:
            return answer


def text_cell(row: Mapping[str, Any], column: str) -> str | None:
    """Return the text of a column, or None for a column that is missing, null or NaN.

    Raises:
        ValueError: the value is not text.
    """
    value = row.get(column)
    if _is_nan(value):
        return None
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{column} is {value!r:.40}, not text")
    return value


def object_cell(row: Mapping[str, Any], column: str) -> Mapping[str, Any]:
    """Return the object in a column, empty for a column without one.

    Raises:
        ValueError: the value is something else.
    """
    value = row.get(column) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{column} is {value!r:.40}, not an object")
    return value


def parse_id(value: object) -> str:
    """Return an id as text.

    Raises:
        ValueError: the id is empty, or neither text nor a whole number.
    """
    # True is an int for Python.
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(f"the id is {value!r:.40}, neither text nor a whole number")
    return str(value)


def parse_precision(value: object) -> int | None:
    """Return a number of decimals.

    Raises:
        ValueError: the value is not a whole number from 0 to 12.
    """
    if value is None or _is_nan(value):
        return None
    # Published tables hold 2.0 for 2, which is in the range, too.
    if isinstance(value, bool) or not isinstance(value, int | float) or value not in range(_MAX_DECIMALS + 1):
        raise ValueError(f"precision is {value!r}, not a whole number of decimals from 0 to {_MAX_DECIMALS}")
    return int(value)


def find_option(text: object, options: Sequence[str]) -> str | list[str]:
    """Return the letter of the option with a text; the letters of all where several have it.

    Raises:
        ValueError: no option has it.
    """
    letters = [letter for letter, option in zip(LETTERS, options, strict=False) if option == text]
    if not letters:
        raise ValueError(f"the answer {text!r:.60} is none of the options {', '.join(map(repr, options)) or '(none)'}")
    return letters if len(letters) > 1 else letters[0]


def parse_options(value: object) -> tuple[str, ...]:
    """Return the texts of options, at most one for each letter.

    Raises:
        ValueError: the value is not a list of texts, or too long.
    """
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"options are {value!r:.60}, not a list of texts")
    if len(value) > len(LETTERS):
        raise ValueError(f"{len(value)} options, there are {len(LETTERS)} letters")
    return tuple(value)


def _parse_coordinate_system(value: object) -> CoordinateSystem:
    """Return the coordinate system of a name; raise ValueError when there is none."""
    if value not in list(CoordinateSystem):
        raise ValueError(f"frame is {value!r:.40}, not one of {', '.join(CoordinateSystem)}")
    return CoordinateSystem(str(value))


def _parse_size(value: object) -> Size | None:
    """Return width and height; raise ValueError unless they are two positive whole numbers."""
    if value is None:
        return None
    sides = value if isinstance(value, list | tuple) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"the size is {value!r:.40}, not [width, height]")
    return Size(*sides)


def subset_values(value: object) -> tuple[str, ...]:
    """Return the subsets that a cell puts an item in: one, or one for each entry of a list."""
    return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)


def read_items(path: Path, parse: Callable[[Mapping[str, Any]], Item]) -> tuple[dict[str, Item], dict[str, str]]:
    """Return the items of a file by id, in the order of the file, and the reasons why rows are malformed, by id.

    The item of a malformed row has nothing but its id: the row's own, or its line where it has none.

    Raises:
        UserError: an id repeats, the file has no rows, or a line is not a JSON object.
    """
    items: dict[str, Item] = {}
    problems: dict[str, str] = {}
    for number, row in read_rows(path):
        try:
            item = parse(row)
        except ValueError as error:
            id = row.get("pid", row.get("id"))
            item = Item(id=str(id) if isinstance(id, str | int) else f"line {number}", answer_type="text", answer="")
            problems[item.id] = f"{path}:{number}: {error}"
        if item.id in items:
            raise UserError(f"{path}:{number}: the id {item.id!r} appears twice; give each question an id of its own")
        items[item.id] = item
    if not items:
        raise UserError(f"{path}: holds no items")
    return items, problems


def read_responses(path: Path, items: Mapping[str, Item]) -> list[ItemResponse]:
    """Return the responses of a file.

    A row has `pid` and `response`, and may have `sample`, `finish`, `tokens`, `frame` and `resized`. Other columns are
    ignored: published files have some.

    Raises:
        UserError: a row has no id or response, no item has its id, or it repeats id and `sample` of another.
    """
    responses: dict[tuple[str, int], ItemResponse] = {}
    for number, row in read_rows(path):
        try:
            response = _parse_response(row)
        except ValueError as error:
            raise UserError(f"{path}:{number}: {error}") from error
        if response.id not in items:
            raise UserError(f"{path}:{number}: no item has the id {response.id!r}; are these the right items?")
        key = response.id, response.response_index
        if key in responses:
            raise UserError(
                f"{path}:{number}: a second response to {response.id!r}; several to one question need a column 'sample'"
            )
        responses[key] = response
    return list(responses.values())


def missing_ids(items: Mapping[str, Item], responses: Iterable[ItemResponse]) -> list[str]:
    """Return the ids of items without a response."""
    answered = {response.id for response in responses}
    return [id for id in items if id not in answered]


def _parse_response(row: Mapping[str, Any]) -> ItemResponse:
    absent = [column for column in ("pid", "response") if column not in row]
    if absent:
        raise ValueError(f"has no column {', '.join(map(repr, absent))}; a response is {{'pid': .., 'response': ..}}")
    text, response_index, num_tokens = row["response"], row.get("sample", 0), row.get("tokens")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"the response is {text!r:.40}, not text")
    if isinstance(response_index, bool) or not isinstance(response_index, int) or response_index < 0:
        raise ValueError(f"sample is {response_index!r:.40}, not a whole number from 0 on")
    if num_tokens is not None and (isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 0):
        raise ValueError(f"tokens is {num_tokens!r:.40}, not how many there are")
    return ItemResponse(
        id=parse_id(row["pid"]),
        text=text or "",
        response_index=response_index,
        # Files that do not say it hold whole responses.
        finished=row.get("finish") != "length",
        num_tokens=num_tokens,
        coordinate_system=_parse_coordinate_system(row.get("frame", CoordinateSystem.PX_ORIGINAL)),
        resized_size=_parse_size(row.get("resized")),
    )


def _is_nan(value: object) -> bool:
    """Return True for NaN, which tables hold where they have no value."""
    return isinstance(value, float) and isnan(value)
