"""The tables of VLMEvalKit: pictures in base64, options in columns of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mmrl.bench.items import ANSWER_TYPES
from mmrl.bench.layouts import Asked, due, listed_options
from mmrl.types import Frame, ImageRef
from mmrl_datasets import vlmevalkit
from mmrl_datasets.formats.row import Cells
from mmrl_datasets.mapping import choices, literal
from mmrl_datasets.media_files import MediaFiles

_GROUPS: Final = (
    *("category", "l2-category", "split", "task", "question_type", "answer_type", "problem_version", "level"),
    *("subject", "data_type", "data_source", "ui_type", "application", "platform", "group"),
)
_LISTS: Final = ("multi-choice", "multi_choice", "MCQ")
"""Types of questions that list their options."""


@dataclass(slots=True, kw_only=True)
class VlmEvalKit:
    """VLMEvalKit's TSV: pictures in base64 or as the index of an earlier row, options in columns A, B, ..; or, as for
    MathVista, in a column `choices`, or nowhere but in the question, which then lists them.

    `kind` is that of answers without options, `answer` their column; boxes are written as `corners` says, in `frame`.
    `marks` are columns that tell this table from others.
    """

    kind: str
    name: str = "VLMEvalKit's TSV"
    answer: str = "answer"
    corners: str = "xyxy"
    frame: Frame | None = None
    marks: tuple[str, ...] = ("index",)
    earlier: dict[str, list[ImageRef]] = field(default_factory=dict)

    @property
    def needs(self) -> frozenset[str]:
        """Columns that tell it from others; every row has them."""
        return frozenset({"question", self.answer, *self.marks})

    def read(self, cells: Cells, files: MediaFiles, file: str) -> Sequence[Asked]:
        """The question of a row. Raises BadRowError."""
        told = [vlmevalkit.written(cells, name) for name in ("hint", "context")]
        question = "\n".join([*filter(None, told), str(cells["question"])])
        images = vlmevalkit.images_of(cells, files, self.earlier)
        below = vlmevalkit.options_of(cells)
        options = below or choices(cells.get("choices") or None)
        if not options and cells.get("question_type") in _LISTS:
            options = listed_options(None, question, lists=True)
        answer = cells[self.answer]
        if self.frame is not None and isinstance(answer, str):
            answer = literal(answer, self.answer)
        columns = {
            "question": question,
            "options": [*options],
            "answer": due(answer, self.corners),
            "answer_type": "choice" if options else self._kind(cells),
            "meta": _groups(cells),
        }
        if self.frame is not None:
            columns["frame"] = str(self.frame)
        if (index := cells.get("index")) is not None:
            self.earlier[str(index)] = images
            columns["id"] = str(index)
        return (Asked(columns, lists=bool(below), found=images),)

    def _kind(self, cells: Cells) -> str:
        kind = cells.get("answer_type")
        return kind if kind in ANSWER_TYPES else self.kind


def _groups(cells: Cells) -> dict[str, object]:
    """What breaks results down: columns, and the fields of `metadata`."""
    groups = {name: cells[name] for name in _GROUPS if cells.get(name)}
    told = cells.get("metadata")
    fields = literal(told, "metadata") if isinstance(told, str) and told.startswith("{") else told
    return groups | ({str(name): value for name, value in fields.items()} if isinstance(fields, Mapping) else {})
