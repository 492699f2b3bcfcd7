"""The core of every reader: rows of any format become samples, or rejects that say why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from mmrl.types import ImageRef, Kind, Part, Place, Reject, Sample, Target, UserError
from mmrl_datasets.formats.files import open_rows
from mmrl_datasets.formats.row import BadRowError, Cells, MissingColumnError, Row, cell, did_you_mean, has, shown
from mmrl_datasets.picture_files import PictureFiles
from mmrl_datasets.targets import LETTERS, AnswerForm, text

MARKER: Final = "<image>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """What a layout finds in a row, unchecked. `options` are those of a multiple choice question, A first."""

    parts: tuple[Part, ...]
    answer: object
    options: tuple[str, ...] = ()
    name: str | None = None
    label: object = None
    thought: object = None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where rows come from and what their samples are called and checked against."""

    path: str
    split: str
    task: str | None
    form: AnswerForm
    limit: int | None = None

    def samples(
        self, place: Place, columns: Collection[str], read: Callable[[Cells], Fields]
    ) -> Iterator[Sample | Reject]:
        """A sample for every row that `read` understands, a `Reject` for every other.

        `columns` are those that `read` may look for: a row without one of them is bad, and when no row has it, the
        setting is.

        Raises:
            UserError: now, the source cannot be opened; later, it breaks off, or no row has one of the columns.
        """
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit={self.limit} must be at least 1, or null for all rows")
        task = self.task or self.path.rstrip("/").rpartition("/")[2].partition(".")[0]
        rows = open_rows(place.base, self.path, self.split)
        return self._converted(rows, f"{task}/{self.split}", task, columns, read)

    def _converted(
        self, rows: Iterable[Row], prefix: str, task: str, columns: Collection[str], read: Callable[[Cells], Fields]
    ) -> Iterator[Sample | Reject]:
        seen: dict[str, str] = {}
        census = _Census(columns)
        for row in islice(rows, self.limit):
            try:
                if isinstance(row.cells, BadRowError):
                    raise row.cells
                census.count(row.cells)
                fields = read(row.cells)
                name = f"{prefix}/{row.name if fields.name is None else fields.name}"
                if name in seen:
                    raise BadRowError(f"the id {name!r} is that of {seen[name]} too")
                seen[name] = row.name
                yield self._sample(name, task, fields)
            except RecursionError:
                yield Reject(f"{prefix}/{row.name}", f"{row.where}: nested too deeply")
            except BadRowError as problem:
                census.note(problem, row.where)
                yield Reject(f"{prefix}/{row.name}", f"{row.where}: {problem}")
        census.close(self.path, whole=self.limit is None)

    def _sample(self, name: str, task: str, fields: Fields) -> Sample:
        if self.form.kind is Kind.BOX and not any(isinstance(part, ImageRef) for part in fields.parts):
            raise BadRowError("a box needs a picture to lie in, and there is none")
        listed = "".join(f"\n{letter}. {option}" for letter, option in zip(LETTERS, fields.options, strict=False))
        return Sample(
            id=name,
            task=task,
            parts=_joined((*fields.parts, listed)),
            target=self._target(fields.answer, "answer", fields),
            label=None if fields.label is None else self._target(fields.label, "label", fields),
            thought=None if fields.thought is None else text(fields.thought, "thought"),
            meta={column: _plain(value) for column, value in fields.meta.items()},
        )

    def _target(self, value: object, role: str, fields: Fields) -> Target:
        return self.form.target(value, role, fields.options)


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


def checked_roles(columns: Mapping[str, str], roles: Collection[str], required: Iterable[str]) -> Mapping[str, str]:
    """The mapping from roles to columns, when it can be one.

    Raises:
        UserError: a role that does not exist or is missing, or a column that is no name.
    """
    for role, column in columns.items():
        if role not in roles:
            raise UserError(f"columns: unknown role {role!r}{did_you_mean(role, roles)}; there are {', '.join(roles)}")
        if not isinstance(column, str):
            raise UserError(f"columns: {role} must name a column, is {shown(column)}")
    missing = [role for role in required if role not in columns]
    if missing:
        raise UserError(f"columns: say which column is the {' and which the '.join(missing)}")
    return columns


def picture_files(place: Place, image_root: str, *, allow_data_urls: bool = False) -> PictureFiles:
    """Pictures below `image_root`, which is relative to `place.base`; unpacked ones go to `place.work`/media."""
    root = (place.base / image_root).resolve()
    return PictureFiles(root=root, media=place.work / "media", allow_data_urls=allow_data_urls)


def identity(value: object) -> str:
    """A row's id.

    Raises:
        BadRowError: it is neither text nor a whole number.
    """
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadRowError(f"id must be text or a whole number, is {shown(value)}")
    return text(str(value), "id")


def optional(cells: Cells, column: str | None) -> object:
    """The value of a column, None when the column has no name or this row lacks it."""
    return cell(cells, column) if column is not None and has(cells, column) else None


def interleaved(question: str, images: Sequence[ImageRef]) -> tuple[Part, ...]:
    """Text with a picture wherever it says `<image>`; when it never does, the pictures come first.

    Raises:
        BadRowError: another number of pictures than of markers.
    """
    texts = question.split(MARKER)
    if len(texts) == 1:
        return (*images, question)
    if len(texts) - 1 != len(images):
        raise BadRowError(f"the question says {MARKER} {len(texts) - 1} times, and there are {len(images)} pictures")
    parts: list[Part] = [texts[0]]
    for image, following in zip(images, texts[1:], strict=True):
        parts += [image, following]
    return tuple(part for part in parts if part != "")


def others(cells: Cells, columns: Iterable[str]) -> dict[str, Any]:
    """The cells that no role has taken; `a.b` takes all of `a`."""
    taken = {name for column in columns for name in (column, column.partition(".")[0])}
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
