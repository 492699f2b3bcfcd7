"""How rows of benchmarks are read, whatever their layout.

A layout turns a row into the columns of canonical JSONL, which scoring reads, and what is to be seen with the question.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Protocol

from mmrl.types import CoordinateSystem, ImageRef
from mmrl_datasets.formats.row import BadRowError, Cells, get_cell, has_column, short_repr
from mmrl_datasets.readers.columns import Column, optional_value, parse_column
from mmrl_datasets.readers.media_resolver import MediaResolver, TimeRange, parse_fps, parse_time_range
from mmrl_datasets.readers.row_to_sample import parse_choices, parse_literal

COLUMN_ROLES: Final = ("id", "question", "options", "answer", "precision", "unit", "cluster", "image_size")
_WRITTEN_LIST: Final = re.compile(r"\[\s*['\"]")
_LETTERED_OPTION: Final = re.compile(r"^\s*\(?([A-H])[.:)]\s*(.+?)\s*$", re.MULTILINE)
_COORDINATE_LIMITS: Final = {CoordinateSystem.NORM_1: 1.0, CoordinateSystem.NORM_1000: 1000.0}
_LIMIT_TOLERANCE: Final = 1.01
ImageNumbering = Literal["each", "some", "parts"]
"""What the numbers in a question (`<image 2>`) name: each picture of the row, some, or parts of the only one."""


class QuestionRow(NamedTuple):
    """A row: canonical columns, the media that go with it as cells name them or as they were `found`, whether options
    are still to be listed below the question, and what numbers in it name.
    """

    columns: dict[str, Any]
    images: object = None
    videos: object = None
    clip: TimeRange = (None, None)
    fps: float | None = None
    append_options: bool = True
    image_refs: Sequence[ImageRef] = ()
    image_numbering: ImageNumbering = "each"


class RowLayout(Protocol):
    """One way in which rows are written."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def required_columns(self) -> frozenset[str]:
        """Columns that tell it from others; every row has them."""

    @property
    def needs_coordinate_system(self) -> bool:
        """Whether someone has to say what its boxes are measured in."""

    def parse_row(self, cells: Cells, files: MediaResolver, file: str) -> Sequence[QuestionRow]:
        """The questions of a row of `file`, a name without its ending. Raises BadRowError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLayout:
    """Columns with fixed roles. Templates are Jinja over a row, as in data sources; `perhaps` are roles whose column
    a row may lack, `groups` columns that break results down.

    `corners` says how boxes are written; options that the question lists already are read from it where it `lists`
    them, and listed below it otherwise. Where the column `each` holds a list, each of its entries is a question of its
    own. `named` is what numbers in questions name, `marks` are columns that tell this table from others. `folders` has
    the folder of the videos by the name of the file that asks about them; those that are folders of frames have `fps`
    of them a second.
    """

    name: str
    roles: Mapping[str, Column]
    optional_roles: Mapping[str, Column]
    answer_type: Column | str
    coordinate_system: str | None = None
    box_format: str = "xyxy"
    subset_columns: tuple[str, ...] = ()
    question_lists_options: bool = False
    explode_column: str | None = None
    video_folders: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    fps: float | None = None
    image_numbering: ImageNumbering = "each"
    signature_columns: tuple[str, ...] = ()
    needs_coordinate_system: bool = False

    @property
    def required_columns(self) -> frozenset[str]:
        """The columns of all roles, and its marks."""
        kind: frozenset[str] = frozenset() if isinstance(self.answer_type, str) else self.answer_type.required_columns
        return kind.union(self.signature_columns, *(role.required_columns for role in self.roles.values()))

    def parse_row(self, cells: Cells, files: MediaResolver, file: str) -> Sequence[QuestionRow]:
        """The questions of a row. Raises BadRowError."""
        if self.explode_column is None:
            return (self._parse_question(cells, file),)
        entries = get_cell(cells, self.explode_column)
        if not isinstance(entries, list) or not entries:
            raise BadRowError(
                f"{self.explode_column} must be a list of texts that is not empty, is {short_repr(entries)}"
            )
        asked = [self._parse_question({**cells, self.explode_column: entry}, file) for entry in entries]
        for number, one in enumerate(asked, 1):
            one.columns["id"] = f"{one.columns['id']}-{number}"
        return asked

    def _parse_question(self, cells: Cells, file: str) -> QuestionRow:
        given: dict[str, Any] = {role: one.read(cells) for role, one in self.roles.items()}
        given |= {role: optional_value(cells, one) for role, one in self.optional_roles.items()}
        kind = self.answer_type if isinstance(self.answer_type, str) else str(self.answer_type.read(cells))
        whole = given.get("prompt")
        question = str(given.get("question") or "") if whole is None else str(whole)
        lists = self.question_lists_options or whole is not None
        meta = {
            name.rpartition(".")[2]: optional_value(cells, parse_column(name, "groups")) for name in self.subset_columns
        }
        columns = {role: given[role] for role in COLUMN_ROLES if given.get(role) is not None}
        columns |= {
            "question": question,
            "options": [
                *(
                    parse_option_texts(given.get("options"), question, question_lists_options=lists)
                    if kind == "choice"
                    else ()
                )
            ],
            "answer": normalize_answer(given["answer"], self.box_format),
            "answer_type": kind,
            "meta": {**meta, **(given.get("meta") or {})},
        }
        if (frame := given.get("frame", self.coordinate_system)) is not None:
            columns["frame"] = frame
            check_box_range(columns["answer"], frame)
        seen = parse_time_range(given.get("start"), given.get("end"))
        videos = given.get("videos")
        if file in self.video_folders:
            videos = f"{self.video_folders[file]}/{videos}"
        fps = parse_fps(given.get("fps", self.fps))
        return QuestionRow(
            columns,
            given.get("images"),
            videos,
            seen,
            fps,
            append_options=not lists,
            image_numbering=self.image_numbering,
        )


def normalize_answer(answer: object, box_format: str) -> object:
    """The right answer of a cell: boxes by their corners, and several texts, which tables write as a list, as one."""
    match answer:
        case [int() | float() as x, int() | float() as y, int() | float() as width, int() | float() as height]:
            return [x, y, x + width, y + height] if box_format == "xywh" else answer
        case str() if _WRITTEN_LIST.match(answer):
            return parse_literal(answer, "answer")
        case _:
            return answer


def check_box_range(answer: object, coordinate_system: object) -> object:
    """The answer; where it is a box, one that can be of this frame. Raises BadRowError."""
    if not isinstance(answer, list | tuple) or coordinate_system not in [*CoordinateSystem]:
        return answer
    most = max((side for side in answer if isinstance(side, int | float)), default=None)
    whole = _COORDINATE_LIMITS.get(CoordinateSystem(str(coordinate_system)))
    if most is not None and most <= 1.0 and coordinate_system != CoordinateSystem.NORM_1:
        raise BadRowError(
            f"the box {short_repr(answer)} is smaller than one unit of {coordinate_system}; is it in norm_1?"
        )
    if most is not None and whole is not None and most > _LIMIT_TOLERANCE * whole:
        raise BadRowError(f"the box {short_repr(answer)} lies outside of {coordinate_system}, which ends at {whole:g}")
    return answer


def parse_option_texts(written_options: object, question: str, *, question_lists_options: bool) -> tuple[str, ...]:
    """The texts of the options, without letters; where the row has no column, those that the question `lists`, or the
    letters of such as stand in the picture.
    """
    if written_options is not None or not question_lists_options:
        options = parse_choices(written_options)
        found = [match for match in map(_LETTERED_OPTION.fullmatch, options) if match]
    else:
        found = [*_LETTERED_OPTION.finditer(question)]
        options = tuple("ABCD")
    lettered = found and [match[1] for match in found] == [chr(ord("A") + place) for place in range(len(found))]
    whole = written_options is None or len(found) == len(options)
    return tuple(match[2] for match in found) if lettered and whole else options


def recognize_layout(layouts: Sequence[RowLayout], cells: Cells) -> RowLayout:
    """The first layout whose columns are all there.

    Raises:
        BadRowError: there is none; the message names the nearest, and what it lacks.
    """
    nearest = min(layouts, key=lambda layout: len(_missing_columns(layout, cells)) / len(layout.required_columns))
    if lacking := _missing_columns(nearest, cells):
        raise BadRowError(
            f"the columns are {', '.join(cells)}; the nearest known layout is {nearest.name}, which needs "
            f"{', '.join(map(repr, lacking))} too"
        )
    return nearest


def _missing_columns(layout: RowLayout, cells: Cells) -> list[str]:
    """The columns that a row lacks for a layout."""
    return sorted(name for name in layout.required_columns if not has_column(cells, name))
