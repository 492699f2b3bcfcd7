"""The tables of VLMEvalKit: pictures in base64, options in columns of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Final

from mmrl.benchmarks.items import ITEM_ANSWER_TYPES
from mmrl.benchmarks.readers.layouts import (
    ImageNumbering,
    QuestionRow,
    check_box_range,
    normalize_answer,
    parse_option_texts,
)
from mmrl.types import CoordinateSystem, ImageRef, UserError
from mmrl_datasets.formats.row import Cells, short_repr
from mmrl_datasets.readers import vlmevalkit
from mmrl_datasets.readers.media_resolver import MediaResolver
from mmrl_datasets.readers.row_to_sample import parse_choices, parse_literal

_SUBSET_COLUMNS: Final = (
    *("category", "l2-category", "split", "task", "question_type", "answer_type", "problem_version", "level"),
    *("subject", "data_type", "data_source", "ui_type", "application", "platform", "group"),
)
_CHOICE_QUESTION_TYPES: Final = ("multi-choice", "multi_choice", "MCQ")
"""Types of questions that list their options."""
_OPEN_QUESTION_OPTION: Final = "Other Answers"
"""The second option of open questions in MMMU's table; the first is what is due."""
_RESIZED_PIXELS: Final = CoordinateSystem.PX_RESIZED  # what a model saw is no table's business


@dataclass(slots=True, kw_only=True)
class VlmEvalKitLayout:
    """VLMEvalKit's TSV: pictures in base64 or as the index of an earlier row, options in columns A, B, ..; or, as for
    MathVista, in a column `choices`, or nowhere but in the question. Those that the question does not list are listed
    below it.

    `kind` is that of answers without options, `answer` their column, or the columns of a box's corners; boxes are
    written as `corners` says, in `frame`, which whoever reads a table that `asks_frame` has to name. `marks` are
    columns that tell this table from others, `named` is what numbers in questions name.
    """

    open_answer_type: str
    name: str = "VLMEvalKit's TSV"
    answer_column: str | tuple[str, ...] = "answer"
    box_format: str = "xyxy"
    coordinate_system: CoordinateSystem | None = None
    needs_coordinate_system: bool = False
    signature_columns: tuple[str, ...] = ("index",)
    image_numbering: ImageNumbering = "each"
    images_by_index: dict[str, list[ImageRef]] = field(default_factory=dict)

    @property
    def required_columns(self) -> frozenset[str]:
        """Columns that tell it from others; every row has them."""
        return frozenset({"question", *self._answer_columns, *self.signature_columns})

    @property
    def _answer_columns(self) -> tuple[str, ...]:
        return (self.answer_column,) if isinstance(self.answer_column, str) else self.answer_column

    def parse_row(self, cells: Cells, files: MediaResolver, file: str) -> Sequence[QuestionRow]:
        """The question of a row. Raises BadRowError, and UserError where the frame has to be named."""
        told = [vlmevalkit.cell_text(cells, name) for name in ("hint", "context")]
        question = "\n".join([*filter(None, told), str(cells["question"] or cells.get("query_wo") or "")])
        images = vlmevalkit.read_images(cells, files, self.images_by_index)
        options, lists = _parse_options(cells, question)
        answer = self._parse_answer(cells)
        if options[1:] == (_OPEN_QUESTION_OPTION,):  # an open question: its options would tell the answer
            answer, options = options[0], ()
        columns = {
            "question": question,
            "options": [*options],
            "answer": answer,
            "answer_type": "choice" if options else self._answer_type(cells),
            "meta": _parse_subsets(cells),
        }
        if self.coordinate_system is not None:
            columns["frame"] = str(self.coordinate_system)
        if (index := cells.get("index")) is not None:
            self.images_by_index[str(index)] = images
            columns["id"] = str(index)
        return (QuestionRow(columns, append_options=lists, image_refs=images, image_numbering=self.image_numbering),)

    def _parse_answer(self, cells: Cells) -> object:
        written = [cells[name] for name in self._answer_columns]
        if self.needs_coordinate_system and self.coordinate_system is None:
            raise UserError(
                f"{self.name}: the table does not say what boxes such as {short_repr(written[0])} are measured in; name it "
                f"with --frame, or `frame` of the benchmark: {', '.join(each for each in CoordinateSystem if each is not _RESIZED_PIXELS)}"
            )
        if self.coordinate_system is None:
            return normalize_answer(written[0], self.box_format)
        given = [
            parse_literal(cell, name) if isinstance(cell, str) else cell
            for name, cell in zip(self._answer_columns, written, strict=True)
        ]
        answer = normalize_answer(given[0] if isinstance(self.answer_column, str) else given, self.box_format)
        return check_box_range(answer, self.coordinate_system) if self.needs_coordinate_system else answer

    def _answer_type(self, cells: Cells) -> str:
        kind = cells.get("answer_type")
        return kind if kind in ITEM_ANSWER_TYPES else self.open_answer_type


def _parse_options(cells: Cells, question: str) -> tuple[tuple[str, ...], bool]:
    """The options of a row, and whether they are still to be listed. Raises BadRowError."""
    if below := vlmevalkit.read_options(cells):
        return below, True
    if given := parse_choices(cells.get("choices") or None):
        letters = ascii_uppercase[: len(given)]
        return given, not all(re.search(rf"\b{letter}[).:]", question) for letter in letters)
    listed = cells.get("question_type") in _CHOICE_QUESTION_TYPES
    return (parse_option_texts(None, question, question_lists_options=True) if listed else ()), False


def _parse_subsets(cells: Cells) -> dict[str, object]:
    """What breaks results down: columns, and the fields of `metadata`."""
    groups = {name: cells[name] for name in _SUBSET_COLUMNS if cells.get(name)}
    told = cells.get("metadata")
    fields = parse_literal(told, "metadata") if isinstance(told, str) and told.startswith("{") else told
    return groups | ({str(name): value for name, value in fields.items()} if isinstance(fields, Mapping) else {})
