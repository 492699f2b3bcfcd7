"""The tables of VLMEvalKit: pictures in base64, options in columns of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Final

from mmrl.benchmarks.items import ANSWER_TYPES
from mmrl.benchmarks.readers.layouts import Asked, Named, due, listed_options, within
from mmrl.types import Frame, ImageRef, UserError
from mmrl_datasets.formats.row import Cells, shown
from mmrl_datasets.readers import vlmevalkit
from mmrl_datasets.readers.media_resolver import MediaFiles
from mmrl_datasets.readers.row_to_sample import choices, literal

_GROUPS: Final = (
    *("category", "l2-category", "split", "task", "question_type", "answer_type", "problem_version", "level"),
    *("subject", "data_type", "data_source", "ui_type", "application", "platform", "group"),
)
_LISTS: Final = ("multi-choice", "multi_choice", "MCQ")
"""Types of questions that list their options."""
_HIDDEN: Final = "Other Answers"
"""The second option of open questions in MMMU's table; the first is what is due."""
_SEEN: Final = Frame.PX_RESIZED  # what a model saw is no table's business


@dataclass(slots=True, kw_only=True)
class VlmEvalKit:
    """VLMEvalKit's TSV: pictures in base64 or as the index of an earlier row, options in columns A, B, ..; or, as for
    MathVista, in a column `choices`, or nowhere but in the question. Those that the question does not list are listed
    below it.

    `kind` is that of answers without options, `answer` their column, or the columns of a box's corners; boxes are
    written as `corners` says, in `frame`, which whoever reads a table that `asks_frame` has to name. `marks` are
    columns that tell this table from others, `named` is what numbers in questions name.
    """

    kind: str
    name: str = "VLMEvalKit's TSV"
    answer: str | tuple[str, ...] = "answer"
    corners: str = "xyxy"
    frame: Frame | None = None
    asks_frame: bool = False
    marks: tuple[str, ...] = ("index",)
    named: Named = "each"
    earlier: dict[str, list[ImageRef]] = field(default_factory=dict)

    @property
    def needs(self) -> frozenset[str]:
        """Columns that tell it from others; every row has them."""
        return frozenset({"question", *self._answer_columns, *self.marks})

    @property
    def _answer_columns(self) -> tuple[str, ...]:
        return (self.answer,) if isinstance(self.answer, str) else self.answer

    def read(self, cells: Cells, files: MediaFiles, file: str) -> Sequence[Asked]:
        """The question of a row. Raises BadRowError, and UserError where the frame has to be named."""
        told = [vlmevalkit.written(cells, name) for name in ("hint", "context")]
        question = "\n".join([*filter(None, told), str(cells["question"] or cells.get("query_wo") or "")])
        images = vlmevalkit.images_of(cells, files, self.earlier)
        options, lists = _options(cells, question)
        answer = self._answer(cells)
        if options[1:] == (_HIDDEN,):  # an open question: its options would tell the answer
            answer, options = options[0], ()
        columns = {
            "question": question,
            "options": [*options],
            "answer": answer,
            "answer_type": "choice" if options else self._kind(cells),
            "meta": _groups(cells),
        }
        if self.frame is not None:
            columns["frame"] = str(self.frame)
        if (index := cells.get("index")) is not None:
            self.earlier[str(index)] = images
            columns["id"] = str(index)
        return (Asked(columns, lists=lists, found=images, named=self.named),)

    def _answer(self, cells: Cells) -> object:
        written = [cells[name] for name in self._answer_columns]
        if self.asks_frame and self.frame is None:
            raise UserError(
                f"{self.name}: the table does not say what boxes such as {shown(written[0])} are measured in; name it "
                f"with --frame, or `frame` of the benchmark: {', '.join(each for each in Frame if each is not _SEEN)}"
            )
        if self.frame is None:
            return due(written[0], self.corners)
        given = [
            literal(cell, name) if isinstance(cell, str) else cell
            for name, cell in zip(self._answer_columns, written, strict=True)
        ]
        answer = due(given[0] if isinstance(self.answer, str) else given, self.corners)
        return within(answer, self.frame) if self.asks_frame else answer

    def _kind(self, cells: Cells) -> str:
        kind = cells.get("answer_type")
        return kind if kind in ANSWER_TYPES else self.kind


def _options(cells: Cells, question: str) -> tuple[tuple[str, ...], bool]:
    """The options of a row, and whether they are still to be listed. Raises BadRowError."""
    if below := vlmevalkit.options_of(cells):
        return below, True
    if given := choices(cells.get("choices") or None):
        letters = ascii_uppercase[: len(given)]
        return given, not all(re.search(rf"\b{letter}[).:]", question) for letter in letters)
    listed = cells.get("question_type") in _LISTS
    return (listed_options(None, question, lists=True) if listed else ()), False


def _groups(cells: Cells) -> dict[str, object]:
    """What breaks results down: columns, and the fields of `metadata`."""
    groups = {name: cells[name] for name in _GROUPS if cells.get(name)}
    told = cells.get("metadata")
    fields = literal(told, "metadata") if isinstance(told, str) and told.startswith("{") else told
    return groups | ({str(name): value for name, value in fields.items()} if isinstance(fields, Mapping) else {})
