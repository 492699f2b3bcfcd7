"""Layouts that are plain tables: each column plays a role, and the mapping from role to column is all there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

from mmrl.benchmarks.readers.layouts import (
    ImageNumbering,
    QuestionRow,
    check_box_range,
    normalize_answer,
    option_letters,
    parse_option_texts,
)
from mmrl.types import CoordinateSystem
from mmrl_datasets.formats.row import BadRowError, Cells, get_cell, short_repr
from mmrl_datasets.readers.answers import ChoiceAnswer
from mmrl_datasets.readers.columns import Column, optional_value, parse_column
from mmrl_datasets.readers.media_resolver import MediaResolver, parse_fps, parse_time_range

# Roles whose values go into the canonical row under the same name.
_COPIED_ROLES: Final = ("id", "question", "options", "answer", "precision", "unit", "cluster", "image_size")


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """A table whose columns have fixed roles.

    Roles are as in canonical JSONL (`id`, `question`, `options`, `answer`, `precision`, `unit`, `cluster`,
    `image_size`, `frame`, `meta`), the media (`images`, `videos`, `start`, `end`, `fps`), and `prompt`: a complete
    question that lists its own options. A column may be a name, `outer.inner` for a key within a cell, a tuple of names
    whose values form a list, or a Jinja template over the row.
    """

    name: str  # name of the layout in error messages
    answer_type: str  # answer type of all rows, or a template for the type of each
    columns: Mapping[str, str | Sequence[str]]  # column by role; a row without one of these is of another layout
    # Column by role; a row may lack these.
    optional_columns: Mapping[str, str | Sequence[str]] = field(default_factory=lambda: MappingProxyType({}))
    subset_columns: tuple[str, ...] = ()  # columns by whose values the report breaks results down
    # Form of a choice's answer: a letter, or an option's text; None takes a valid letter as one and else a text.
    choice_answer: ChoiceAnswer | None = "letter"
    # Coordinate system of boxes and points; None when a column says it, or no answer has coordinates.
    coordinate_system: CoordinateSystem | None = None
    box_format: str = "xyxy"  # `xyxy` for two corners, `xywh` for a corner with width and height
    question_lists_options: bool = False  # True when the question already lists its options
    explode_column: str | None = None  # column with a list, each entry of which makes a question
    # Folder of the videos, by the name of the file that asks about them.
    video_folders: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    fps: float | None = None  # frames per second of videos that are stored as folders of frames
    image_numbering: ImageNumbering = "each"  # meaning of numbered placeholders in the question
    signature_columns: tuple[str, ...] = ()  # columns without a role that distinguish this layout

    @cached_property
    def required_columns(self) -> frozenset[str]:
        """Columns that every row of this layout has."""
        required = {*self.signature_columns}
        for role, column in self._columns.items():
            if role not in self.optional_columns:
                required |= column.required_columns
        return frozenset(required)

    def parse_row(self, cells: Cells, files: MediaResolver, file: str) -> Sequence[QuestionRow]:
        """Return the question of a row, or one for each entry of `explode_column`.

        Raises:
            BadRowError: a column is missing or holds an impossible value.
        """
        if self.explode_column is None:
            return (self._parse_question(cells, file),)
        entries = get_cell(cells, self.explode_column)
        if not isinstance(entries, list) or not entries:
            raise BadRowError(
                f"{self.explode_column} must be a list of texts that is not empty, is {short_repr(entries)}"
            )
        questions = []
        for number, entry in enumerate(entries, 1):
            question = self._parse_question({**cells, self.explode_column: entry}, file)
            # Questions that one row makes must not share its id.
            if "id" in question.columns:
                question.columns["id"] = f"{question.columns['id']}-{number}"
            questions.append(question)
        return questions

    # Kept, since compiling a template takes longer than filling it in for many rows.
    @cached_property
    def _columns(self) -> Mapping[str, Column]:
        """Required and optional columns by role, including the answer type's if it is a template."""
        written = {**self.columns, **self.optional_columns}
        columns = {role: parse_column(column, role) for role, column in written.items()}
        if "{{" in self.answer_type:
            columns["answer_type"] = parse_column(self.answer_type, "answer_type")
        return columns

    def _parse_question(self, cells: Cells, file: str) -> QuestionRow:
        values: dict[str, Any] = {}
        try:
            for role, column in self._columns.items():
                is_optional = role in self.optional_columns
                values[role] = optional_value(cells, column) if is_optional else column.read(cells)
            lists_options = self.question_lists_options or values.get("prompt") is not None
            canonical_columns = self._canonical_columns(cells, values, lists_options=lists_options)
        except BadRowError as problem:
            # The id is kept, to name the row in messages and to count it as missing.
            return QuestionRow({"id": values["id"]} if values.get("id") is not None else {}, problem=str(problem))
        videos = values.get("videos")
        # Only the name of the rows' file says in which folder their videos are.
        if file in self.video_folders:
            videos = f"{self.video_folders[file]}/{videos}"
        return QuestionRow(
            canonical_columns,
            values.get("images"),
            videos,
            parse_time_range(values.get("start"), values.get("end")),
            parse_fps(values.get("fps", self.fps)),
            append_options=not lists_options,
            image_numbering=self.image_numbering,
        )

    def _canonical_columns(self, cells: Cells, values: Mapping[str, Any], *, lists_options: bool) -> dict[str, Any]:
        prompt = values.get("prompt")
        question = str(values.get("question") or "") if prompt is None else str(prompt)
        answer_type = str(values.get("answer_type", self.answer_type))
        options: tuple[str, ...] = ()
        if answer_type == "choice":
            options = parse_option_texts(values.get("options"), question, question_lists_options=lists_options)
        columns = {role: values[role] for role in _COPIED_ROLES if values.get(role) is not None}
        columns["question"] = question
        columns["options"] = list(options)
        columns["answer"] = normalize_answer(values["answer"], self.box_format)
        if answer_type == "choice" and self.choice_answer is not None:
            columns["answer"] = option_letters(columns["answer"], options, self.choice_answer)
        columns["answer_type"] = answer_type
        subsets = {}
        for name in self.subset_columns:
            last_key = name.rpartition(".")[2]
            subsets[last_key] = optional_value(cells, parse_column(name, "subset_columns"))
        columns["meta"] = {**subsets, **(values.get("meta") or {})}
        # If the row has a column for it, the cell decides, even an empty one.
        coordinate_system = values.get("frame", self.coordinate_system)
        if coordinate_system is not None:
            columns["frame"] = coordinate_system
            check_box_range(columns["answer"], coordinate_system)
        return columns
