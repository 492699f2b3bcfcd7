"""Layout of VLMEvalKit's TSV files: images in base64, and each option in its own column."""

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
    option_letters,
    parse_option_texts,
)
from mmrl.types import CoordinateSystem, ImageRef, UserError
from mmrl_datasets.formats.row import Cells, short_repr
from mmrl_datasets.readers import vlmevalkit
from mmrl_datasets.readers.answers import ChoiceAnswer
from mmrl_datasets.readers.media_resolver import MediaResolver
from mmrl_datasets.readers.row_to_sample import parse_choices, parse_literal

_SUBSET_COLUMNS: Final = (
    *("category", "l2-category", "split", "task", "question_type", "answer_type", "problem_version", "level"),
    *("subject", "data_type", "data_source", "ui_type", "application", "platform", "group"),
)
# Values of `question_type` for questions that list their options in their text.
_CHOICE_QUESTION_TYPES: Final = ("multi-choice", "multi_choice", "MCQ")
# Second option of open questions in MMMU's table; the first option is the answer.
_OPEN_QUESTION_OPTION: Final = "Other Answers"
# Pixels of the resized image depend on the model, so no file can be in them.
_NAMEABLE_COORDINATES: Final = [system for system in CoordinateSystem if system is not CoordinateSystem.PX_RESIZED]


@dataclass(slots=True, kw_only=True)
class VlmEvalKitLayout:
    """VLMEvalKit's TSV: images in base64, or as the index of an earlier row with the same image.

    Options are in columns A, B, ..., in a column `choices` (MathVista, MATH-V), or only in the question. Options
    that the question does not list are listed below it.
    """

    open_answer_type: str  # answer type of questions without options, unless the column `answer_type` says it
    name: str = "VLMEvalKit's TSV"  # name of the layout in error messages
    answer_column: str | Sequence[str] = "answer"  # column of the answer, or the columns of a box's corners
    box_format: str = "xyxy"  # `xyxy` for two corners, `xywh` for a corner with width and height
    # Coordinate system of boxes; None when answers have none, or when the user still has to name it.
    coordinate_system: CoordinateSystem | None = None
    needs_coordinate_system: bool = False  # True when the file does not say its coordinate system
    signature_columns: tuple[str, ...] = ("index",)  # columns that distinguish this layout from a similar one
    image_numbering: ImageNumbering = "each"  # meaning of numbered placeholders in the question
    choices_answer: ChoiceAnswer = "text"  # form of the answer where options are in the column `choices`
    # Images of the rows read so far, by `index`; a reading starts with none.
    images_by_index: dict[str, list[ImageRef]] = field(default_factory=dict)

    @property
    def required_columns(self) -> frozenset[str]:
        """Columns that every row of this layout has."""
        return frozenset({"question", *self._answer_columns, *self.signature_columns})

    @property
    def _answer_columns(self) -> Sequence[str]:
        return (self.answer_column,) if isinstance(self.answer_column, str) else self.answer_column

    def parse_row(self, cells: Cells, files: MediaResolver, file: str) -> Sequence[QuestionRow]:
        """Return the question of a row.

        Raises:
            BadRowError: a cell holds an impossible value.
            UserError: the coordinate system must be named by the user and was not.
        """
        hints = filter(None, (vlmevalkit.cell_text(cells, "hint"), vlmevalkit.cell_text(cells, "context")))
        question = "\n".join([*hints, str(cells["question"] or cells.get("query_wo") or "")])
        images = vlmevalkit.read_images(cells, files, self.images_by_index)
        options, append_options = _parse_options(cells, question)
        answer = self._parse_answer(cells)
        if options[1:] == (_OPEN_QUESTION_OPTION,):
            # The options of an open question must not be shown: the first one is the answer.
            answer, options = options[0], ()
        if options:
            # Columns A, B, .. and options in the question alone come with the letter of the correct one.
            in_choices = not vlmevalkit.read_options(cells) and cells.get("choices")
            answer = option_letters(answer, options, self.choices_answer if in_choices else "letter")
        answer_type = "choice" if options else cells.get("answer_type")
        columns = {
            "question": question,
            "options": list(options),
            "answer": answer,
            # Other tables have a column of this name, too, with words that are not our types.
            "answer_type": answer_type if answer_type in ITEM_ANSWER_TYPES else self.open_answer_type,
            "precision": _parse_precision(cells, answer_type, answer),
            "unit": vlmevalkit.cell_text(cells, "unit") or None,
            "meta": _parse_subsets(cells),
        }
        if self.coordinate_system is not None:
            columns["frame"] = str(self.coordinate_system)
        index = cells.get("index")
        if index is not None:
            # Later rows may refer to these images by this index.
            self.images_by_index[str(index)] = images
            columns["id"] = str(index)
        row = QuestionRow(
            columns, append_options=append_options, image_refs=images, image_numbering=self.image_numbering
        )
        return (row,)

    def _parse_answer(self, cells: Cells) -> object:
        written = [cells[name] for name in self._answer_columns]
        if self.needs_coordinate_system and self.coordinate_system is None:
            raise UserError(
                f"{self.name}: the table does not state the coordinate system of boxes such as "
                f"{short_repr(written[0])}; name it with --coordinates (Python: coordinate_system), or with the key "
                f"`coordinates` of a benchmark in training: {', '.join(_NAMEABLE_COORDINATES)}"
            )
        if self.coordinate_system is None:
            return normalize_answer(written[0], self.box_format)
        values = [
            parse_literal(cell, name) if isinstance(cell, str) else cell
            for name, cell in zip(self._answer_columns, written, strict=True)
        ]
        box = values[0] if isinstance(self.answer_column, str) else values
        answer = normalize_answer(box, self.box_format)
        return check_box_range(answer, self.coordinate_system) if self.needs_coordinate_system else answer


def _parse_options(cells: Cells, question: str) -> tuple[tuple[str, ...], bool]:
    """Return the options of a row, and True when they must still be listed below the question."""
    lettered = vlmevalkit.read_options(cells)
    if lettered:
        return lettered, True
    choices = parse_choices(cells.get("choices") or None)
    if choices:
        letters = ascii_uppercase[: len(choices)]
        # A question lists its options if every letter is in it, followed by a mark.
        return choices, not all(re.search(rf"\b{letter}[).:]", question) for letter in letters)
    if cells.get("question_type") in _CHOICE_QUESTION_TYPES:
        return parse_option_texts(None, question, question_lists_options=True), False
    return (), False


def _parse_precision(cells: Cells, answer_type: object, answer: object) -> object:
    """Return the decimals to which a number is compared: the column `precision`, else the decimals of a float."""
    precision = cells.get("precision")
    if precision in (None, ""):
        decimals = re.search(r"\.(\d{1,12})", str(answer)) if answer_type == "float" else None
        return len(decimals[1]) if decimals else None
    # A table that had empty cells writes 1 as 1.0.
    whole = re.fullmatch(r"(\d+)(?:\.0*)?", str(precision))
    return int(whole[1]) if whole else precision


def _parse_subsets(cells: Cells) -> dict[str, object]:
    """Return the values that break results down: known columns, and the fields of `metadata`."""
    subsets: dict[str, object] = {name: cells[name] for name in _SUBSET_COLUMNS if cells.get(name)}
    metadata = cells.get("metadata")
    if isinstance(metadata, str) and metadata.startswith("{"):
        metadata = parse_literal(metadata, "metadata")
    if isinstance(metadata, Mapping):
        for name, value in metadata.items():
            subsets[str(name)] = value
    return subsets
