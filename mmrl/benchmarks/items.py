"""Items, which hold what scoring needs of a question, and responses to them: both as rows of JSONL files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, Field, StrictInt, StrictStr, ValidationError

from mmrl.answer import AnswerValue, validate_value
from mmrl.benchmarks.extraction.numbers import find_numbers
from mmrl.benchmarks.verdict import read_rows
from mmrl.types import AnswerType, CoordinateSystem, Size, UserError

ItemAnswerType = Literal["choice", "integer", "float", "list", "text", "count", "box", "boxes", "point"]
ITEM_ANSWER_TYPES: Final[tuple[str, ...]] = get_args(ItemAnswerType)
COORDINATE_TYPES: Final = ("box", "boxes", "point")
LETTERS: Final = tuple(ascii_uppercase)  # of options, in order


def _clean_float(value: object) -> object:
    """Return None for NaN, which tables hold where they have no value, and 2 for 2.0."""
    if not isinstance(value, float):
        return value
    if isnan(value):
        return None
    return int(value) if value.is_integer() else value


# Types of cells. A cell of another type is refused, never converted.
RowId = Annotated[StrictStr, Field(min_length=1)] | StrictInt
OptionalText = Annotated[StrictStr | None, BeforeValidator(_clean_float)]
OptionTexts = Annotated[list[StrictStr], Field(max_length=len(LETTERS))]  # one for each letter at most
OptionalPrecision = Annotated[
    Annotated[StrictInt, Field(ge=0, le=12)] | None,  # decimals
    BeforeValidator(_clean_float),
]
_Count = Annotated[StrictInt, Field(ge=0)]
_Side = Annotated[StrictInt, Field(gt=0)]
_SizeCell = tuple[_Side, _Side]  # width and height
_RowT = TypeVar("_RowT", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A question as scoring sees it."""

    id: str  # unique within the benchmark
    answer_type: ItemAnswerType  # decides how an answer is found and compared
    # The correct answer: the letter of an option, a number, a text, a list of accepted ones, or checked coordinates.
    # An option is its place, never its text, since options may be letters themselves, or equal.
    answer: Any
    question: str = ""  # text of the question; extraction prefers numbers that it does not give
    options: tuple[str, ...] = ()  # texts of the options, the first is A; empty for other questions
    precision: int | None = None  # decimals to which numbers are compared; None compares them exactly
    unit: str | None = None  # unit of a number
    # Coordinate system of the answer, where it has coordinates.
    coordinate_system: CoordinateSystem = CoordinateSystem.PX_ORIGINAL
    image_size: Size | None = None  # width and height of the image in pixels; None when the file does not say it
    cluster: str = ""  # items of one cluster share their image, so that intervals resample them together
    # Subsets by the column that makes them; an item may be in several, such as one for each of its skills.
    subsets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
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


class _CanonicalRow(BaseModel):
    id: RowId
    answer: Any
    answer_type: ItemAnswerType
    question: OptionalText = None
    options: OptionTexts | None = None
    precision: OptionalPrecision = None
    unit: OptionalText = None
    frame: CoordinateSystem | None = None
    image_size: _SizeCell | None = None
    cluster: Any = None
    meta: dict[str, Any] | None = None


def parse_canonical_item(row: Mapping[str, Any]) -> Item:
    """Return the item of a row of canonical JSONL.

    Raises:
        ValueError: a column is missing or holds an impossible value.
    """
    cells = check_columns(_CanonicalRow, row)
    if cells.answer_type in COORDINATE_TYPES and cells.frame is None:
        raise ValueError(f"a {cells.answer_type} needs the column 'frame': one of {', '.join(CoordinateSystem)}")
    options, meta = tuple(cells.options or ()), cells.meta or {}
    return Item(
        id=str(cells.id),
        answer_type=cells.answer_type,
        answer=parse_answer(cells.answer_type, cells.answer, options),
        question=cells.question or "",
        options=options,
        precision=cells.precision,
        unit=cells.unit,
        coordinate_system=cells.frame or CoordinateSystem.PX_ORIGINAL,
        image_size=Size(*cells.image_size) if cells.image_size else None,
        cluster=str(cells.cluster or cells.id),
        subsets={key: subset_values(value) for key, value in meta.items() if not isinstance(value, Mapping | None)},
        meta=meta,
    )


def check_columns(columns: type[_RowT], row: Mapping[str, Any]) -> _RowT:
    """Return the checked cells of a row; columns that the model does not have are ignored.

    Raises:
        ValueError: a column is missing or holds an impossible value.
    """
    try:
        return columns.model_validate(dict(row))
    except ValidationError as error:
        problems = error.errors()
        absent = [repr(problem["loc"][0]) for problem in problems if problem["loc"][0] not in row]
        if absent:
            known = ", ".join(columns.model_fields)
            raise ValueError(f"has no column {', '.join(absent)}; the known columns are {known}") from None
        column, message = str(problems[0]["loc"][0]), problems[0]["msg"].replace("Input should be", "not")
        raise ValueError(f"{column} is {row[column]!r:.60}: {message}") from None


def parse_answer(answer_type: ItemAnswerType, answer: object, options: tuple[str, ...]) -> AnswerValue:
    """Return the correct answer in the form that scoring compares: checked coordinates, the letter of an option.

    For a choice, the letter of an option stays that letter, and any other text is the text of an option.

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


def find_option(text: object, options: Sequence[str]) -> str | list[str]:
    """Return the letter of the option with a text; the letters of all where several have it.

    Raises:
        ValueError: no option has it.
    """
    letters = [letter for letter, option in zip(LETTERS, options, strict=False) if option == text]
    if not letters:
        raise ValueError(f"the answer {text!r:.60} is none of the options {', '.join(map(repr, options)) or '(none)'}")
    return letters if len(letters) > 1 else letters[0]


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
            raise UserError(f"{path}:{number}: the id {item.id!r} appears twice; give each question its own id")
        items[item.id] = item
    if not items:
        raise UserError(f"{path}: holds no items")
    return items, problems


class _ResponseRow(BaseModel):
    pid: RowId
    response: StrictStr | None
    sample: _Count = 0
    finish: Any = None
    tokens: _Count | None = None
    frame: CoordinateSystem = CoordinateSystem.PX_ORIGINAL
    resized: _SizeCell | None = None


def read_responses(path: Path, items: Mapping[str, Item]) -> list[ItemResponse]:
    """Return the responses of a file.

    A row has `pid` and `response`, and may have `sample`, `finish`, `tokens`, `frame` and `resized`. Other columns are
    ignored: published files have some.

    Raises:
        UserError: there are no rows, or a row lacks an id or response, names no item, or repeats id and `sample`.
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
    if not responses:
        raise UserError(f"{path}: holds no responses")
    return list(responses.values())


def missing_ids(items: Mapping[str, Item], responses: Iterable[ItemResponse]) -> list[str]:
    """Return the ids of items without a response."""
    answered = {response.id for response in responses}
    return [id for id in items if id not in answered]


def _parse_response(row: Mapping[str, Any]) -> ItemResponse:
    cells = check_columns(_ResponseRow, row)
    return ItemResponse(
        id=str(cells.pid),
        text=cells.response or "",
        response_index=cells.sample,
        # Files that do not say it hold whole responses.
        finished=cells.finish != "length",
        num_tokens=cells.tokens,
        coordinate_system=cells.frame,
        resized_size=Size(*cells.resized) if cells.resized else None,
    )
