"""The core of every reader: rows of any format become samples, or rejects that say why."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final, NamedTuple

from mmrl.answer import MAY_BE_FRAMED
from mmrl.types import ImageRef, MediaRef, Part, Place, Reject, Sample, Target, UserError, VideoRef
from mmrl_datasets.formats.registry import open_rows
from mmrl_datasets.formats.row import BadRowError, Cells, MissingColumnError, Row, has, shown
from mmrl_datasets.readers.answers import LETTERS, AnswerForm, Corners, answer_form, text
from mmrl_datasets.readers.columns import Column, Filled, column

MARKER: Final = re.compile(r"<(?P<kind>image|video)>|<image[ _]?(?P<number>[1-9][0-9]?)>")


class Mark(NamedTuple):
    """A place for a medium: the next of a kind, or picture number `number`, from 1."""

    kind: str
    number: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """What a layout finds in a row, unchecked. `options` are those of a multiple choice question, A first; they are in
    `parts` already. `task` is the row's own, if it says one; `medium` is the number of the medium that coordinates
    belong to.
    """

    parts: tuple[Part, ...]
    form: AnswerForm
    answer: object
    options: tuple[str, ...] = ()
    name: str | None = None
    task: object = None
    label: object = None
    thought: object = None
    response: object = None
    medium: object = None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where rows come from and what their samples are called."""

    path: str
    split: str
    task: str | None
    limit: int | None = None

    def rows(self, place: Place) -> Iterator[Row]:
        """The rows of a file, a folder or the hub, by the name's ending; raises as `open_rows`."""
        return open_rows(place.base, self.path, self.split)

    def samples(
        self, rows: Iterable[Row], columns: Collection[str], read: Callable[[Cells], Fields]
    ) -> Iterator[Sample | Reject]:
        """A sample for every row that `read` understands, a `Reject` for every other.

        `columns` are those that `read` may look for: a row without one of them is bad, and when no row has it, the
        setting is.

        Raises:
            UserError: now, an impossible limit; later, the source breaks off or is empty, or no row has a column.
        """
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit={self.limit} must be at least 1, or null for all rows")
        task = self.task or self.path.rstrip("/").rpartition("/")[2].partition(".")[0]
        return self._converted(rows, task, columns, read)

    def _converted(
        self, rows: Iterable[Row], task: str, columns: Collection[str], read: Callable[[Cells], Fields]
    ) -> Iterator[Sample | Reject]:
        seen: dict[str, str] = {}
        census = _Census(columns)
        row = None
        for row in islice(rows, self.limit):
            try:
                if isinstance(row.cells, BadRowError):
                    raise row.cells
                census.count(row.cells)
                fields = read(row.cells)
                own_task = task if fields.task is None else text(fields.task, "task")
                name = _named(f"{own_task}/{self.split}/", row.name if fields.name is None else fields.name)
                if name in seen:
                    raise BadRowError(f"the id {name!r} is that of {seen[name]} too")
                seen[name] = row.name
                yield _sample(name, own_task, fields)
            except RecursionError:
                yield Reject(f"{task}/{self.split}/{row.name}", f"{row.where}: nested too deeply")
            except BadRowError as problem:
                census.note(problem, row.where)
                yield Reject(f"{task}/{self.split}/{row.name}", f"{row.where}: {problem}")
        if row is None:
            raise UserError(f"{self.path}: holds no row")
        census.close(self.path, whole=self.limit is None)


def _named(prefix: str, name: str) -> str:
    """A sample's id; a row may write it whole."""
    return name if name.startswith(prefix) else prefix + name


def _sample(name: str, task: str, fields: Fields) -> Sample:
    parts = _joined(fields.parts)
    target = _target(fields.answer, "answer", fields, parts)
    return Sample(
        id=name,
        task=task,
        parts=parts,
        target=target,
        label=None if fields.label is None else _target(fields.label, "label", fields, parts),
        thought=None if fields.thought is None else text(fields.thought, "thought"),
        response=None if fields.response is None else text(fields.response, "response"),
        meta={column: _plain(value) for column, value in fields.meta.items()},
    )


def _target(value: object, role: str, fields: Fields, parts: Sequence[Part]) -> Target:
    target = fields.form.target(value, role, fields.options)
    count = sum(not isinstance(part, str) for part in parts)
    if target.frame is not None and not count:
        raise BadRowError(f"a {target.kind} needs a picture or video to lie in, and there is none")
    if fields.medium is None:
        return target
    medium = fields.medium
    if isinstance(medium, str) and medium.strip().isdecimal():
        medium = int(medium)
    if isinstance(medium, bool) or not isinstance(medium, int) or not 0 <= medium < count:
        raise BadRowError(f"medium must be the number of one of {count} media, from 0; is {shown(fields.medium)}")
    return replace(target, medium=medium)


class _Census:
    """Tells a bad row from a wrong setting: a column that is missing everywhere was named wrongly."""

    PATIENCE: Final = 1000  # rows without the column, before the rest of a large file is spared

    def __init__(self, columns: Collection[str]) -> None:
        self._unseen = set(columns)
        self._complaint = ""
        self._lacking = self._rows = 0

    def count(self, cells: Cells) -> None:
        self._rows += 1
        if self._unseen:
            self._unseen = {column for column in self._unseen if not has(cells, column)}

    def note(self, problem: BadRowError, where: str) -> None:
        if isinstance(problem, MissingColumnError):
            self._lacking += 1
            self._complaint = self._complaint or f"{where}: {problem}"
            if self._lacking == self._rows == self.PATIENCE:
                raise UserError(self._complaint)

    def close(self, path: str, *, whole: bool) -> None:
        if self._lacking and self._lacking == self._rows:
            raise UserError(self._complaint)
        if whole and self._rows and self._unseen:
            columns = ", ".join(map(repr, sorted(self._unseen)))
            raise UserError(f"{path}: no row has the column {columns}; correct `columns`, or leave it out")


@dataclass(frozen=True, slots=True)
class Forms:
    """What the answers of a source are: all of one form, or each of the kind that a template says."""

    kind: AnswerForm | Filled
    frame: str | Filled | None
    corners: Corners

    @property
    def needs(self) -> frozenset[str]:
        """The columns that the templates need."""
        return frozenset().union(*(part.needs for part in (self.kind, self.frame) if isinstance(part, Filled)))

    def of(self, cells: Cells) -> AnswerForm:
        """The form of a row's answer.

        Raises:
            BadRowError: the template says no kind.
        """
        if isinstance(self.kind, AnswerForm):
            return self.kind
        kind = text(self.kind.of(cells), "kind").strip()
        try:
            return answer_form(kind, self._frame(cells) if kind in MAY_BE_FRAMED else None, self.corners)
        except UserError as error:
            raise BadRowError(str(error)) from error

    def _frame(self, cells: Cells) -> str | None:
        return self.frame.of(cells) if isinstance(self.frame, Filled) else self.frame


def forms(kind: str, frame: str | None, corners: Corners) -> Forms:
    """The forms that options name; raises as `answer_form`, and UserError for a template of `frame` beside one kind."""
    written = column(kind, "kind")
    framed = None if frame is None else column(frame, "frame")
    if isinstance(written, Filled):
        return Forms(written, framed if isinstance(framed, Filled) else frame, corners)
    if isinstance(framed, Filled):
        raise UserError(f"frame={frame!r} is a template, which goes with one of `kind`")
    return Forms(answer_form(kind, frame, corners), frame, corners)


def identity(value: object) -> str:
    """A row's id.

    Raises:
        BadRowError: it is neither text nor a whole number.
    """
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadRowError(f"id must be text or a whole number, is {shown(value)}")
    return text(str(value), "id")


def listed(options: Iterable[str]) -> str:
    """Options as they stand below a question."""
    return "".join(f"\n{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))


def choices(value: object) -> tuple[str, ...]:
    """The options of a cell: a list, or text that writes one as Python or JSON do; none for null and empty ones.

    Raises:
        BadRowError: it is neither, or one option is none.
    """
    options = literal(value, "choices") if isinstance(value, str) else value
    if options is None or options == []:
        return ()
    if not isinstance(options, list) or len(options) < 2:
        raise BadRowError(f"choices must be a list of two or more, is {shown(value)}")
    return tuple(text(option, "choice") for option in options)


def literal(written: str, role: str) -> object:
    """What text says in the way of Python or JSON.

    Raises:
        BadRowError: it says nothing.
    """
    try:
        return ast.literal_eval(written.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise BadRowError(f"{role} must be a list, is {shown(written)}") from error


def marked(written: str) -> list[str | Mark]:
    """Text, cut where it has a place for a medium."""
    pieces: list[str | Mark] = []
    end = 0
    for match in MARKER.finditer(written):
        number = match["number"]
        pieces += [written[end : match.start()], Mark("image", int(number)) if number else Mark(match["kind"])]
        end = match.end()
    return [piece for piece in (*pieces, written[end:]) if piece != ""]


def interleaved(
    pieces: Sequence[Part | Mark], images: Sequence[ImageRef], videos: Sequence[VideoRef] = ()
) -> tuple[Part, ...]:
    """The pieces with a medium in every place for one; when there is no place, the media come first.

    Where there are only videos, `<image>` stands for a video, as LLaVA-Video writes it. Numbered places name a picture,
    which may stand in several.

    Raises:
        BadRowError: another number of media than of places, or a picture that no number names.
    """
    marks = [piece for piece in pieces if isinstance(piece, Mark)]
    media = _numbered(marks, images, videos) if any(mark.number for mark in marks) else _in_turn(marks, images, videos)
    if not marks:
        return (*media, *(piece for piece in pieces if not isinstance(piece, Mark)))
    waiting = iter(media)
    return tuple(next(waiting) if isinstance(piece, Mark) else piece for piece in pieces)


def _numbered(marks: Sequence[Mark], images: Sequence[ImageRef], videos: Sequence[VideoRef]) -> list[MediaRef]:
    named = {mark.number for mark in marks}
    if None in named or videos:
        raise BadRowError("numbered places for pictures stand beside others: number all, or none")
    wrong = named ^ set(range(1, len(images) + 1))
    if wrong:
        raise BadRowError(f"the question names the pictures {sorted(filter(None, named))}, and there are {len(images)}")
    return [images[mark.number - 1] for mark in marks if mark.number]


def _in_turn(marks: Sequence[Mark], images: Sequence[ImageRef], videos: Sequence[VideoRef]) -> list[MediaRef]:
    if not marks:
        return [*images, *videos]
    kinds = ["video" if videos and not images else mark.kind for mark in marks]
    for kind, media in (("image", images), ("video", videos)):
        count = kinds.count(kind)
        if count != len(media):
            raise BadRowError(f"the question says <{kind}> {count} times, and there are {len(media)} {kind}s")
    waiting: dict[str, Iterator[MediaRef]] = {"image": iter(images), "video": iter(videos)}
    return [next(waiting[kind]) for kind in kinds]


def others(cells: Cells, columns: Iterable[Column]) -> dict[str, Any]:
    """The cells that no role has taken whole; `a.b` takes all of `a`."""
    used = (name for column in columns for name in column.uses_up)
    taken = {name for column in used for name in (column, column.partition(".")[0])}
    return {column: value for column, value in cells.items() if column not in taken}


def _joined(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Neighbouring texts become one."""
    joined: list[Part] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    return tuple(joined)


def _plain(value: object) -> object:
    """What JSON can say of a value; of bytes their number."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return f"{len(value)} bytes"
        case Mapping():
            return {str(key): _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
    return str(value)
