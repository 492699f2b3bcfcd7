"""Contract between a benchmark's file format and scoring, with the parsing that all formats share.

A layout turns one row of a file into the columns of canonical JSONL, which scoring reads, plus the media to show.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any, Final, Literal, NamedTuple, Protocol

from mmrl.benchmarks.items import LETTERS, find_option
from mmrl.types import CoordinateSystem, ImageRef
from mmrl_datasets.formats.row import BadRowError, Cells, short_repr
from mmrl_datasets.readers.answers import MAX_COORDINATE, ChoiceAnswer
from mmrl_datasets.readers.media_resolver import MediaResolver, TimeRange
from mmrl_datasets.readers.row_to_sample import parse_choices, parse_literal

ImageNumbering = Literal["each", "some", "parts"]
"""Meaning of the numbers in placeholders such as `<image 2>`.

each: every image of the row is named. some: images that no placeholder names are not shown; MMMU keeps them for its
explanations. parts: they name regions of the row's only image, such as figures on one sheet.
"""

_WRITTEN_LIST: Final = re.compile(r"\[\s*['\"]")
_LETTERED_OPTION: Final = re.compile(r"^\s*\(?([A-H])[.:)]\s*(.+?)\s*$", re.MULTILINE)
_LIMIT_TOLERANCE: Final = 1.01  # slack above the limit before a box counts as being in another coordinate system


class UnscorableRowError(BadRowError):
    """Raised for a row whose answer no rule can score. Readers count such rows and leave them out."""


class QuestionRow(NamedTuple):
    """One question in canonical columns, before its media are opened."""

    columns: dict[str, Any]  # values by canonical column name; None means a missing column
    images: object = None  # images as the cell names them: bytes, a path, or a list of these
    videos: object = None  # videos as the cell names them
    clip: TimeRange = (None, None)  # start and end of the part of the video to show, in seconds
    fps: float | None = None  # frames per second of a video that is stored as a folder of frames
    append_options: bool = True  # True when the options must still be listed below the question
    image_refs: Sequence[ImageRef] = ()  # images that the layout has opened already; these replace `images`
    image_numbering: ImageNumbering = "each"  # meaning of numbered placeholders in the question
    problem: str = ""  # reason why the row makes no question; `columns` then has nothing but its id


class RowLayout(Protocol):
    """One way to write a benchmark's rows. Implement it, or fill in a `TableLayout`, to read another format."""

    @property
    def name(self) -> str:
        """Name of the layout in error messages."""

    @property
    def required_columns(self) -> frozenset[str]:
        """Columns that every row of this layout has; they distinguish it from other layouts."""

    def parse_row(self, cells: Cells, files: MediaResolver, file: str) -> Sequence[QuestionRow]:
        """Return the questions of a row.

        Args:
            cells: the row's values by column name.
            files: resolver of the paths and bytes that cells hold.
            file: name of the row's file without its suffix.

        Raises:
            BadRowError: the row cannot be read.
            UnscorableRowError: the row can be read, and no rule can score its answer.
        """


def normalize_answer(answer: object, box_format: str) -> object:
    """Return the answer of a cell with boxes as corners, and a list that was written as text as a list."""
    match answer:
        case [int() | float() as x, int() | float() as y, int() | float() as width, int() | float() as height]:
            return [x, y, x + width, y + height] if box_format == "xywh" else answer
        case str() if _WRITTEN_LIST.match(answer):
            return parse_literal(answer, "answer")
        case _:
            return answer


def option_letters(answer: object, options: Sequence[str], written_as: ChoiceAnswer) -> object:
    """Return the letter of the correct option; the letters of all where several have the text that a cell gives.

    Raises:
        BadRowError: there is no such option.
    """
    if written_as == "text":
        try:
            return find_option(answer, options)
        except ValueError as error:
            raise BadRowError(str(error)) from error
    # EMMA writes some letters in lower case.
    letter = answer.strip().upper() if isinstance(answer, str) else answer
    if letter not in LETTERS[: len(options)]:
        raise BadRowError(f"the answer {short_repr(answer)} is not the letter of one of {len(options)} options")
    return letter


def check_box_range(answer: object, coordinate_system: object) -> object:
    """Return the answer unchanged; a box must be plausible in this coordinate system.

    Raises:
        BadRowError: the box exceeds the coordinate system, or looks normalised to 1 where it should not be.
    """
    if not isinstance(answer, list | tuple) or coordinate_system not in [*CoordinateSystem]:
        return answer
    # A box in the wrong coordinate system would make every response count as incorrect without any error.
    largest = max((side for side in answer if isinstance(side, int | float)), default=None)
    if largest is None:
        return answer
    if largest <= 1.0 and coordinate_system != CoordinateSystem.NORM_1:
        raise BadRowError(
            f"the box {short_repr(answer)} is smaller than one unit of {coordinate_system}; is it in norm_1?"
        )
    limit = MAX_COORDINATE.get(CoordinateSystem(str(coordinate_system)))
    if limit is not None and largest > _LIMIT_TOLERANCE * limit:
        raise BadRowError(f"the box {short_repr(answer)} is outside of {coordinate_system}, which ends at {limit:g}")
    return answer


def parse_option_texts(written_options: object, question: str, *, question_lists_options: bool) -> tuple[str, ...]:
    """Return the texts of the options without their letters.

    Without a column of options they are read from a question that lists them. Where the question lists none either,
    they are in the image, and the letters A to D are the options.
    """
    if written_options is not None or not question_lists_options:
        options = parse_choices(written_options)
        lettered = list(filter(None, map(_LETTERED_OPTION.fullmatch, options)))
        if len(lettered) != len(options):
            return options
    else:
        options = tuple("ABCD")
        lettered = [*_LETTERED_OPTION.finditer(question)]
    # Letters that do not count up from A are not labels; they belong to the texts.
    letters = "".join(match[1] for match in lettered)
    in_order = bool(letters) and ascii_uppercase.startswith(letters)
    return tuple(match[2] for match in lettered) if in_order else options
