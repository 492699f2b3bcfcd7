"""The core of every reader: rows of any format become samples, or rejects that say why."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final, NamedTuple

from mmrl.answer import POSSIBLE_COORDINATE_TYPES
from mmrl.types import ContentPart, DatasetContext, ImageRef, MediaRef, RejectedRow, Sample, Target, UserError, VideoRef
from mmrl_datasets.formats.registry import open_rows
from mmrl_datasets.formats.row import BadRowError, Cells, MissingColumnError, Row, has_column, short_repr
from mmrl_datasets.readers.answers import LETTERS, AnswerSpec, BoxFormat, check_text, make_answer_spec
from mmrl_datasets.readers.columns import Column, ColumnTemplate, parse_column

PLACEHOLDER: Final = re.compile(r"<(?P<kind>image|video)>|<image[ _]?(?P<number>[1-9][0-9]?)>")


class MediaPlaceholder(NamedTuple):
    """A place for a medium: the next of a kind, or picture number `number`, from 1."""

    media_type: str
    number: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFields:
    """What a layout finds in a row, unchecked. `options` are those of a multiple choice question, A first; they are in
    `parts` already. `task` is the row's own, if it says one; `medium` is the number of the medium that coordinates
    belong to.
    """

    parts: tuple[ContentPart, ...]
    answer_spec: AnswerSpec
    answer: object
    choices: tuple[str, ...] = ()
    row_id: str | None = None
    task: object = None
    label: object = None
    thought: object = None
    response: object = None
    medium: object = None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """Where rows come from and what their samples are called."""

    path: str
    split: str
    task: str | None
    limit: int | None = None

    def read_rows(self, place: DatasetContext) -> Iterator[Row]:
        """The rows of a file, a folder or the hub, by the name's ending; raises as `open_rows`."""
        return open_rows(place.base_dir, self.path, self.split)

    def convert_rows(
        self, rows: Iterable[Row], expected_columns: Collection[str], read_fields: Callable[[Cells], SampleFields]
    ) -> Iterator[Sample | RejectedRow]:
        """A sample for every row that `read` understands, a `Reject` for every other.

        `columns` are those that `read` may look for: a row without one of them is bad, and when no row has it, the
        setting is.

        Raises:
            UserError: now, an impossible limit; later, the source breaks off or is empty, or no row has a column.
        """
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit={self.limit} must be at least 1, or null for all rows")
        task = self.task or self.path.rstrip("/").rpartition("/")[2].partition(".")[0]
        return self._convert_rows(rows, task, expected_columns, read_fields)

    def _convert_rows(
        self,
        rows: Iterable[Row],
        task: str,
        expected_columns: Collection[str],
        read_fields: Callable[[Cells], SampleFields],
    ) -> Iterator[Sample | RejectedRow]:
        seen: dict[str, str] = {}
        census = _MissingColumnCheck(expected_columns)
        row = None
        for row in islice(rows, self.limit):
            try:
                if isinstance(row.cells, BadRowError):
                    raise row.cells
                census.add_row(row.cells)
                fields = read_fields(row.cells)
                own_task = task if fields.task is None else check_text(fields.task, "task")
                name = _sample_id(f"{own_task}/{self.split}/", row.name if fields.row_id is None else fields.row_id)
                if name in seen:
                    raise BadRowError(f"the id {name!r} is that of {seen[name]} too")
                seen[name] = row.name
                yield _make_sample(name, own_task, fields)
            except RecursionError:
                yield RejectedRow(f"{task}/{self.split}/{row.name}", f"{row.location}: nested too deeply")
            except BadRowError as problem:
                census.add_problem(problem, row.location)
                yield RejectedRow(f"{task}/{self.split}/{row.name}", f"{row.location}: {problem}")
        if row is None:
            raise UserError(f"{self.path}: holds no row")
        census.finish(self.path, whole=self.limit is None)


def _sample_id(prefix: str, name: str) -> str:
    """A sample's id; a row may write it whole."""
    return name if name.startswith(prefix) else prefix + name


def _make_sample(name: str, task: str, fields: SampleFields) -> Sample:
    parts = _merge_texts(fields.parts)
    target = _make_target(fields.answer, "answer", fields, parts)
    return Sample(
        id=name,
        task=task,
        parts=parts,
        target=target,
        label=None if fields.label is None else _make_target(fields.label, "label", fields, parts),
        thinking=None if fields.thought is None else check_text(fields.thought, "thought"),
        response=None if fields.response is None else check_text(fields.response, "response"),
        meta={column: _to_json_value(value) for column, value in fields.meta.items()},
    )


def _make_target(value: object, role: str, fields: SampleFields, parts: Sequence[ContentPart]) -> Target:
    target = fields.answer_spec.parse_target(value, role, fields.choices)
    count = sum(not isinstance(part, str) for part in parts)
    if target.coordinate_system is not None and not count:
        raise BadRowError(f"a {target.answer_type} needs a picture or video to lie in, and there is none")
    if fields.medium is None:
        return target
    medium = fields.medium
    if isinstance(medium, str) and medium.strip().isdecimal():
        medium = int(medium)
    if isinstance(medium, bool) or not isinstance(medium, int) or not 0 <= medium < count:
        raise BadRowError(f"medium must be the number of one of {count} media, from 0; is {short_repr(fields.medium)}")
    return replace(target, media_index=medium)


class _MissingColumnCheck:
    """Tells a bad row from a wrong setting: a column that is missing everywhere was named wrongly."""

    MAX_ROWS: Final = 1000  # rows without the column, before the rest of a large file is spared

    def __init__(self, columns: Collection[str]) -> None:
        self._unseen_columns = set(columns)
        self._first_problem = ""
        self._num_incomplete = self._num_rows = 0

    def add_row(self, cells: Cells) -> None:
        self._num_rows += 1
        if self._unseen_columns:
            self._unseen_columns = {column for column in self._unseen_columns if not has_column(cells, column)}

    def add_problem(self, problem: BadRowError, where: str) -> None:
        if isinstance(problem, MissingColumnError):
            self._num_incomplete += 1
            self._first_problem = self._first_problem or f"{where}: {problem}"
            if self._num_incomplete == self._num_rows == self.MAX_ROWS:
                raise UserError(self._first_problem)

    def finish(self, path: str, *, whole: bool) -> None:
        if self._num_incomplete and self._num_incomplete == self._num_rows:
            raise UserError(self._first_problem)
        if whole and self._num_rows and self._unseen_columns:
            columns = ", ".join(map(repr, sorted(self._unseen_columns)))
            raise UserError(f"{path}: no row has the column {columns}; correct `columns`, or leave it out")


@dataclass(frozen=True, slots=True)
class RowAnswerSpec:
    """What the answers of a source are: all of one form, or each of the kind that a template says."""

    answer_type: AnswerSpec | ColumnTemplate
    coordinate_system: str | ColumnTemplate | None
    box_format: BoxFormat

    @property
    def required_columns(self) -> frozenset[str]:
        """The columns that the templates need."""
        return frozenset().union(
            *(
                part.required_columns
                for part in (self.answer_type, self.coordinate_system)
                if isinstance(part, ColumnTemplate)
            )
        )

    def resolve(self, cells: Cells) -> AnswerSpec:
        """The form of a row's answer.

        Raises:
            BadRowError: the template says no kind.
        """
        if isinstance(self.answer_type, AnswerSpec):
            return self.answer_type
        kind = check_text(self.answer_type.read(cells), "kind").strip()
        try:
            return make_answer_spec(
                kind,
                self._resolve_coordinate_system(cells) if kind in POSSIBLE_COORDINATE_TYPES else None,
                self.box_format,
            )
        except UserError as error:
            raise BadRowError(str(error)) from error

    def _resolve_coordinate_system(self, cells: Cells) -> str | None:
        return (
            self.coordinate_system.read(cells)
            if isinstance(self.coordinate_system, ColumnTemplate)
            else self.coordinate_system
        )


def make_row_answer_spec(kind: str, frame: str | None, corners: BoxFormat) -> RowAnswerSpec:
    """The forms that options name; raises as `answer_form`, and UserError for a template of `frame` beside one kind."""
    written = parse_column(kind, "kind")
    framed = None if frame is None else parse_column(frame, "frame")
    if isinstance(written, ColumnTemplate):
        return RowAnswerSpec(written, framed if isinstance(framed, ColumnTemplate) else frame, corners)
    if isinstance(framed, ColumnTemplate):
        raise UserError(f"frame={frame!r} is a template, which goes with one of `kind`")
    return RowAnswerSpec(make_answer_spec(kind, frame, corners), frame, corners)


def parse_id(value: object) -> str:
    """A row's id.

    Raises:
        BadRowError: it is neither text nor a whole number.
    """
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadRowError(f"id must be text or a whole number, is {short_repr(value)}")
    return check_text(str(value), "id")


def format_choices(options: Iterable[str]) -> str:
    """Options as they stand below a question."""
    return "".join(f"\n{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))


def parse_choices(value: object) -> tuple[str, ...]:
    """The options of a cell: a list, or text that writes one as Python or JSON do; none for null and empty ones.

    Raises:
        BadRowError: it is neither, or one option is none.
    """
    options = parse_literal(value, "choices") if isinstance(value, str) else value
    if options is None or options == []:
        return ()
    if not isinstance(options, list) or len(options) < 2:
        raise BadRowError(f"choices must be a list of two or more, is {short_repr(value)}")
    return tuple(check_text(option, "choice") for option in options)


def parse_literal(written: str, role: str) -> object:
    """What text says in the way of Python or JSON.

    Raises:
        BadRowError: it says nothing.
    """
    try:
        return ast.literal_eval(written.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise BadRowError(f"{role} must be a list, is {short_repr(written)}") from error


def split_at_placeholders(written: str) -> list[str | MediaPlaceholder]:
    """Text, cut where it has a place for a medium."""
    pieces: list[str | MediaPlaceholder] = []
    end = 0
    for match in PLACEHOLDER.finditer(written):
        number = match["number"]
        pieces += [
            written[end : match.start()],
            MediaPlaceholder("image", int(number)) if number else MediaPlaceholder(match["kind"]),
        ]
        end = match.end()
    return [piece for piece in (*pieces, written[end:]) if piece != ""]


def insert_media(
    pieces: Sequence[ContentPart | MediaPlaceholder], images: Sequence[ImageRef], videos: Sequence[VideoRef] = ()
) -> tuple[ContentPart, ...]:
    """The pieces with a medium in every place for one; when there is no place, the media come first.

    Where there are only videos, `<image>` stands for a video, as LLaVA-Video writes it. Numbered places name a picture,
    which may stand in several.

    Raises:
        BadRowError: another number of media than of places, or a picture that no number names.
    """
    marks = [piece for piece in pieces if isinstance(piece, MediaPlaceholder)]
    media = (
        _media_by_number(marks, images, videos)
        if any(mark.number for mark in marks)
        else _media_in_order(marks, images, videos)
    )
    if not marks:
        return (*media, *(piece for piece in pieces if not isinstance(piece, MediaPlaceholder)))
    waiting = iter(media)
    return tuple(next(waiting) if isinstance(piece, MediaPlaceholder) else piece for piece in pieces)


def _media_by_number(
    marks: Sequence[MediaPlaceholder], images: Sequence[ImageRef], videos: Sequence[VideoRef]
) -> list[MediaRef]:
    named = {mark.number for mark in marks}
    if None in named or videos:
        raise BadRowError("numbered places for pictures stand beside others: number all, or none")
    wrong = named ^ set(range(1, len(images) + 1))
    if wrong:
        raise BadRowError(f"the question names the pictures {sorted(filter(None, named))}, and there are {len(images)}")
    return [images[mark.number - 1] for mark in marks if mark.number]


def _media_in_order(
    marks: Sequence[MediaPlaceholder], images: Sequence[ImageRef], videos: Sequence[VideoRef]
) -> list[MediaRef]:
    if not marks:
        return [*images, *videos]
    kinds = ["video" if videos and not images else mark.media_type for mark in marks]
    for kind, media in (("image", images), ("video", videos)):
        count = kinds.count(kind)
        if count != len(media):
            raise BadRowError(f"the question says <{kind}> {count} times, and there are {len(media)} {kind}s")
    waiting: dict[str, Iterator[MediaRef]] = {"image": iter(images), "video": iter(videos)}
    return [next(waiting[kind]) for kind in kinds]


def unused_cells(cells: Cells, columns: Iterable[Column]) -> dict[str, Any]:
    """The cells that no role has taken whole; `a.b` takes all of `a`."""
    used = (name for column in columns for name in column.consumed_columns)
    taken = {name for column in used for name in (column, column.partition(".")[0])}
    return {column: value for column, value in cells.items() if column not in taken}


def _merge_texts(parts: Iterable[ContentPart]) -> tuple[ContentPart, ...]:
    """Neighbouring texts become one."""
    joined: list[ContentPart] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    return tuple(joined)


def _to_json_value(value: object) -> object:
    """What JSON can say of a value; of bytes their number."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return f"{len(value)} bytes"
        case Mapping():
            return {str(key): _to_json_value(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_to_json_value(inner) for inner in value]
    return str(value)
