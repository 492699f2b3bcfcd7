"""Turn rows into samples. All readers share this: they only say which fields of a sample a row holds.

A row that cannot be used becomes a `RejectedRow` with the reason. A setting that fits no row is a `UserError`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Annotated, Any, Final, NamedTuple

from pydantic import Field

from mmrl.answer import POSSIBLE_COORDINATE_TYPES, is_nested_deeper
from mmrl.types import ContentPart, ImageRef, MediaRef, RejectedRow, Sample, Target, UserError, VideoRef
from mmrl_datasets.formats.row import BadRowError, Cells, MissingColumnError, Row, has_column, short_repr
from mmrl_datasets.readers.answers import AnswerSpec, BoxFormat, ChoiceAnswer, check_text, make_answer_spec
from mmrl_datasets.readers.columns import Column, collect_required_columns, is_template, parse_template

PLACEHOLDER: Final = re.compile(r"<(?P<media_type>image|video)>|<image[ _]?(?P<number>[1-9][0-9]?)>")
ReadFields = Callable[[Cells], "SampleFields"]  # returns the fields of a row, or raises BadRowError
Limit = Annotated[int, Field(ge=1)] | None  # most rows to read; None reads all
_MAX_NESTING = 200  # levels of lists and mappings in a cell; no published layout has ten


class MediaPlaceholder(NamedTuple):
    """A position in a question where an image or a video belongs."""

    media_type: str  # `image` or `video`
    number: int | None = None  # the number of the image, from 1; None takes the next one of this type


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFields:
    """The fields of a sample as a reader finds them in a row, not checked yet."""

    parts: tuple[ContentPart, ...]  # the question, with the choices in it
    answer_spec: AnswerSpec  # the type of the answer and of the label
    answer: object
    choices: tuple[str, ...] = ()  # options of a multiple choice question, A first; the answer may quote one of them
    row_id: str | None = None  # None takes the name of the row
    task: object = None  # None takes the task of the source
    label: object = None  # the answer of an annotator, who may be wrong
    thinking: object = None
    response: object = None  # a whole response to imitate
    media_index: object = None  # number of the image or video that coordinates lie in, from 0; None means 0
    meta: Mapping[str, Any] = field(default_factory=dict)


def convert_rows(
    rows: Iterable[Row],
    read_fields: ReadFields,
    expected_columns: Collection[str],
    *,
    path: str,
    split: str,
    task: str | None,
    limit: Limit,
) -> Iterator[Sample | RejectedRow]:
    """Yield a sample for each row that `read_fields` accepts, and a `RejectedRow` for every other.

    `expected_columns` is what `read_fields` may look for, and `path` is the source, as `open_rows` reads it. The
    split is part of the samples' ids. A `task` of None takes the name of the file, a `limit` of None reads all rows.

    Raises:
        UserError: the source breaks off or is empty, or no row has one of the expected columns.
    """
    task = task or path.rstrip("/").rpartition("/")[2].partition(".")[0]
    missing_columns = _MissingColumnCheck(expected_columns, path)
    row_of_id: dict[str, str] = {}
    row = None
    for row in islice(rows, limit):
        try:
            cells = _usable_cells(row)
            missing_columns.add_row(cells)
            fields = read_fields(cells)
            own_task = task if fields.task is None else check_text(fields.task, "task")
            # A row may give its id with the prefix or without.
            prefix = f"{own_task}/{split}/"
            name = row.name if fields.row_id is None else fields.row_id
            sample_id = prefix + name.removeprefix(prefix)
            if sample_id in row_of_id:
                raise BadRowError(f"the id {sample_id!r} is also the id of {row_of_id[sample_id]}")
            row_of_id[sample_id] = row.name
            yield _make_sample(sample_id, own_task, fields)
        except RecursionError:
            # Parsers of JSON and of literals raise this for a text within a cell.
            yield RejectedRow(f"{task}/{split}/{row.name}", f"{row.location}: nested too deeply")
        except BadRowError as problem:
            missing_columns.add_problem(problem, row.location)
            yield RejectedRow(f"{task}/{split}/{row.name}", f"{row.location}: {problem}")
    if row is None:
        raise UserError(f"{path}: holds no row")
    missing_columns.finish()


@dataclass(frozen=True, slots=True)
class RowAnswerSpec:
    """The type of a source's answers: one for all rows, or one that templates name for each row."""

    # Returns the spec of a row's answer; raises BadRowError if templates name no known type or coordinates.
    resolve: Callable[[Cells], AnswerSpec]
    required_columns: frozenset[str] = frozenset()  # columns that a row must have for the templates


def make_row_answer_spec(
    answer_type: str, coordinates: str | None, box_format: BoxFormat, choice_answer: ChoiceAnswer | None = None
) -> RowAnswerSpec:
    """Return the spec that the options of a reader name, each a word or a template.

    Raises:
        UserError: an unknown word (see `make_answer_spec`), or a template of coordinates with a fixed `answer_type`.
    """
    coordinates_template = parse_template(str(coordinates), "coordinates") if is_template(coordinates) else None
    if not is_template(answer_type):
        if coordinates_template:
            raise UserError(f"coordinates={coordinates!r} is a template, so `answer_type` must be one too")
        spec = make_answer_spec(answer_type, coordinates, box_format, choice_answer)
        return RowAnswerSpec(lambda _: spec)
    type_template = parse_template(answer_type, "answer_type")

    def resolve(cells: Cells) -> AnswerSpec:
        own_type = check_text(type_template.read(cells), "answer_type").strip()
        own_coordinates = coordinates
        if own_type not in POSSIBLE_COORDINATE_TYPES:
            # Rows of other types may have no coordinates to name, so the template is not filled for them.
            own_coordinates = None
        elif coordinates_template:
            filled = coordinates_template.read(cells)
            own_coordinates = None if filled is None else str(filled)
        try:
            return make_answer_spec(own_type, own_coordinates, box_format, choice_answer)
        except UserError as error:
            raise BadRowError(str(error)) from error

    return RowAnswerSpec(resolve, collect_required_columns(filter(None, (type_template, coordinates_template))))


def parse_id(value: object) -> str:
    """Return the id of a row as text; raises BadRowError if it is neither text nor a whole number."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadRowError(f"id must be text or a whole number, is {short_repr(value)}")
    return check_text(str(value), "id")


def parse_choices(value: object) -> tuple[str, ...]:
    """Return the options of a multiple choice question: a list, or text that writes one as Python or JSON do.

    Null and an empty list give no options. Raises BadRowError for anything but two or more texts.
    """
    options = parse_literal(value, "choices") if isinstance(value, str) else value
    if options is None or options == []:
        return ()
    if not isinstance(options, list) or len(options) < 2:
        raise BadRowError(f"choices must be a list of two or more, is {short_repr(value)}")
    return tuple(check_text(option, "choice") for option in options)


def parse_literal(text: str, role: str) -> object:
    """Return the value that a Python literal writes, which covers most lists in JSON; raises BadRowError."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise BadRowError(f"{role} must be a list, is {short_repr(text)}") from error


def split_at_placeholders(text: str) -> list[str | MediaPlaceholder]:
    """Cut a text at `<image>` and `<video>`, and at `<image 2>` without `<image>`; empty pieces are left out."""
    pieces: list[str | MediaPlaceholder] = []
    end = 0
    for match in PLACEHOLDER.finditer(text):
        number = match["number"]
        if number and "<image>" in text:
            continue  # it refers to an image whose place is elsewhere
        pieces.append(text[end : match.start()])
        if number:
            pieces.append(MediaPlaceholder("image", int(number)))
        else:
            pieces.append(MediaPlaceholder(match["media_type"]))
        end = match.end()
    pieces.append(text[end:])
    return [piece for piece in pieces if piece != ""]


def insert_media(
    pieces: Sequence[ContentPart | MediaPlaceholder], images: Sequence[ImageRef], videos: Sequence[VideoRef] = ()
) -> tuple[ContentPart, ...]:
    """Return the pieces with an image or video in place of each placeholder; without placeholders, media come first.

    If there are only videos, `<image>` means a video. A numbered placeholder names an image, which may be in
    several places.

    Raises:
        BadRowError: the numbers of placeholders and media differ, or no placeholder names one of the images.
    """
    placeholders = [piece for piece in pieces if isinstance(piece, MediaPlaceholder)]
    if not placeholders:
        return (*images, *videos, *(piece for piece in pieces if not isinstance(piece, MediaPlaceholder)))
    if any(placeholder.number for placeholder in placeholders):
        media = _media_by_number(placeholders, images, videos)
    else:
        media = _media_in_order(placeholders, images, videos)
    remaining = iter(media)
    return tuple(next(remaining) if isinstance(piece, MediaPlaceholder) else piece for piece in pieces)


def unused_cells(cells: Cells, columns: Iterable[Column]) -> dict[str, Any]:
    """Return the cells that no column consumes as a whole, for `meta`; of a column `a.b`, the other keys of `a`."""
    unused = dict(cells)
    for name in sorted({name for column in columns for name in column.consumed_columns}):
        unused = _without_column(unused, name)
    return unused


def _without_column(cells: Cells, column: str) -> dict[str, Any]:
    """Return the cells without the value that `get_cell` finds; a mapping that holds nothing else goes with it."""
    outer, _, inner = column.partition(".")
    if column not in cells and inner and isinstance(cells.get(outer), Mapping):
        rest = _without_column(cells[outer], inner)
        if rest:
            return {**cells, outer: rest}
        column = outer
    return {name: value for name, value in cells.items() if name != column}


def _make_sample(sample_id: str, task: str, fields: SampleFields) -> Sample:
    # Neighbouring texts become one part, so that it does not matter where the question came from.
    merged: list[ContentPart] = []
    for part in fields.parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        elif part != "":
            merged.append(part)
    parts = tuple(merged)
    target = _make_target(fields.answer, "answer", fields, parts)
    return Sample(
        id=sample_id,
        task=task,
        parts=parts,
        target=target,
        label=None if fields.label is None else _make_target(fields.label, "label", fields, parts),
        thinking=None if fields.thinking is None else check_text(fields.thinking, "thinking"),
        response=None if fields.response is None else check_text(fields.response, "response"),
        meta={column: _to_json_value(value) for column, value in fields.meta.items()},
    )


def _make_target(value: object, role: str, fields: SampleFields, parts: Sequence[ContentPart]) -> Target:
    target = fields.answer_spec.parse_target(value, role, fields.choices)
    num_media = sum(not isinstance(part, str) for part in parts)
    if target.coordinate_system is not None and not num_media:
        raise BadRowError(f"a {target.answer_type} needs an image or video to lie in, and there is none")
    if fields.media_index is None:
        return target
    index = fields.media_index
    if isinstance(index, str) and index.strip().isdecimal():
        index = int(index)
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < num_media:
        raise BadRowError(
            f"media_index must be the number of one of {num_media} images and videos, from 0; "
            f"is {short_repr(fields.media_index)}"
        )
    return replace(target, media_index=index)


class _MissingColumnCheck:
    """Distinguishes a wrong setting from bad rows: a column that every row lacks was named wrongly."""

    MAX_ROWS: Final = 1000  # enough to distinguish a wrong name from a gap in a good table

    def __init__(self, columns: Collection[str], path: str) -> None:
        self._path, self._unseen_columns, self._first_problem = path, set(columns), ""
        self._cells: Cells = {}  # of the last row
        self._num_incomplete = self._num_rows = 0

    def add_row(self, cells: Cells) -> None:
        self._num_rows += 1
        self._cells = cells
        if self._unseen_columns:
            self._unseen_columns = {column for column in self._unseen_columns if not has_column(cells, column)}

    def add_problem(self, problem: BadRowError, location: str) -> None:
        if isinstance(problem, MissingColumnError):
            self._num_incomplete += 1
            self._first_problem = self._first_problem or f"{location}: {problem}"
            # Not one row had the column so far, so the setting is wrong and the rest of the file need not be read.
            if self._num_incomplete == self._num_rows == self.MAX_ROWS:
                raise UserError(self._first_problem)

    def finish(self) -> None:
        if self._num_incomplete and self._num_incomplete == self._num_rows:
            raise UserError(self._first_problem)
        # Optional columns may be missing in some rows. If no row has one, its name is wrong.
        if self._num_rows and self._unseen_columns:
            raise UserError(f"{self._path}: in every row: {MissingColumnError(min(self._unseen_columns), self._cells)}")


def _media_by_number(
    placeholders: Sequence[MediaPlaceholder], images: Sequence[ImageRef], videos: Sequence[VideoRef]
) -> list[MediaRef]:
    numbers = {placeholder.number for placeholder in placeholders}
    # Beside numbered placeholders, it is undefined which image an unnumbered one takes.
    if None in numbers or videos:
        raise BadRowError("numbered places for images are beside others: number all, or none")
    if numbers != set(range(1, len(images) + 1)):
        named = sorted(number for number in numbers if number)
        raise BadRowError(f"the question names the images {named}, and there are {len(images)}")
    return [images[placeholder.number - 1] for placeholder in placeholders if placeholder.number]


def _media_in_order(
    placeholders: Sequence[MediaPlaceholder], images: Sequence[ImageRef], videos: Sequence[VideoRef]
) -> list[MediaRef]:
    # LLaVA-Video writes `<image>` where a video belongs.
    only_videos = videos and not images
    types = ["video" if only_videos else placeholder.media_type for placeholder in placeholders]
    for media_type, media in (("image", images), ("video", videos)):
        count = types.count(media_type)
        if count != len(media):
            raise BadRowError(
                f"the question says <{media_type}> {count} times, and there are {len(media)} {media_type}s"
            )
    remaining: dict[str, Iterator[MediaRef]] = {"image": iter(images), "video": iter(videos)}
    return [next(remaining[media_type]) for media_type in types]


def _to_json_value(value: object) -> object:
    # Bytes become their number, and other objects, such as dates, their text: `meta` is written into checkpoints.
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return f"{len(value)} bytes"
        case Mapping():
            return {str(key): _to_json_value(inner) for key, inner in value.items()}
        case list() | tuple():
            return list(map(_to_json_value, value))
    return str(value)


def _usable_cells(row: Row) -> Cells:
    """Return the cells of a row; raise BadRowError if they cannot be read, or are nested too deeply."""
    if isinstance(row.cells, BadRowError):
        raise row.cells
    if is_nested_deeper(row.cells, _MAX_NESTING):
        raise BadRowError("nested too deeply")
    return row.cells
