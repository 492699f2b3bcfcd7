"""Parse the cell that holds the correct answer. A cell that does not fit is refused, never guessed at."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, TypeVar

from mmrl.answer import (
    ANSWER_PLACEHOLDERS,
    COORDINATE_TYPES,
    POSSIBLE_COORDINATE_TYPES,
    AnswerValue,
    list_coordinates,
    parse_answer_value,
    validate_value,
)
from mmrl.answer.values import is_number
from mmrl.types import AnswerType, CoordinateSystem, Target, UserError
from mmrl_datasets.choices import LETTERS
from mmrl_datasets.formats.row import BadRowError, did_you_mean, short_repr

MAX_COORDINATE: Final[Mapping[CoordinateSystem | None, float]] = {
    CoordinateSystem.NORM_1: 1.0,
    CoordinateSystem.NORM_1000: 1000.0,
}
"""The largest coordinate of each system that has one. Pixels have none, as the image is not opened here."""
NUMBER_PATTERN: Final = re.compile(r"[+-]?\d{1,300}(\.\d+)?", re.ASCII)
ChoiceAnswer = Literal["letter", "text"]  # how a row names the correct choice
BoxFormat = Literal["xyxy", "xywh"]  # how a row writes boxes: two corners, or a corner with width and height
_EnumT = TypeVar("_EnumT", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSpec:
    """The type of an answer and how its coordinates are written."""

    answer_type: AnswerType
    coordinate_system: CoordinateSystem | None = None  # set for answers with coordinates, and only for them
    box_format: BoxFormat = "xyxy"  # How cells write boxes. Boxes of targets are always x1, y1, x2, y2.
    choice_answer: ChoiceAnswer | None = None  # None takes either, and refuses a letter that is another choice's text

    def parse_target(self, value: object, role: str, options: Sequence[str] = ()) -> Target:
        """Return the target that a cell holds; raises BadRowError if it holds no answer of this type.

        `role` names the cell in errors, `answer` or `label`; `options` are the options of a choice question, A first.
        """
        match self.answer_type:
            case AnswerType.TEXT:
                parsed: object = check_text(value, role)
            case AnswerType.NUMBER:
                parsed = value
                # Tables of text write numbers, too. Digits are limited: Python refuses to parse endless ones.
                if isinstance(value, str) and NUMBER_PATTERN.fullmatch(value.strip()):
                    parsed = float(value) if "." in value else int(value)
                if not is_number(parsed):
                    raise BadRowError(f"{role} must be a finite number, is {short_repr(value)}")
            case AnswerType.CHOICE:
                parsed = self._parse_letter(value, role, options)
            case AnswerType.BOX:
                parsed = self._parse_box(value, role)
            case _:
                parsed = self._parse_value(value, role)
        return Target(answer_type=self.answer_type, value=parsed, coordinate_system=self.coordinate_system)

    def _parse_value(self, cell: object, role: str) -> AnswerValue:
        """Parse an answer of any other type, given as JSON or as the text of an answer."""
        try:
            if self.answer_type is AnswerType.BOXES and self.box_format == "xywh":
                # Text that may be in a ```json fence.
                entries = parse_answer_value(AnswerType.JSON, cell.strip()) if isinstance(cell, str) else cell
                if isinstance(entries, list | tuple):
                    cell = list(map(_to_xyxy, entries))
            if isinstance(cell, str):
                value = parse_answer_value(self.answer_type, cell.strip())
            else:
                value = validate_value(self.answer_type, cell)
        except ValueError as error:
            raise BadRowError(
                f"{role} must be {ANSWER_PLACEHOLDERS[self.answer_type]}: {error}: {short_repr(cell)}"
            ) from error
        if self.coordinate_system is not None:
            for coordinates in list_coordinates(self.answer_type, value):
                self._check_inside(coordinates, role, short_repr(cell))
        return value

    def _parse_letter(self, value: object, role: str, options: Sequence[str]) -> str:
        """Return the letter of an answer that is a letter or quotes one option; it must mean one letter only."""
        answer = check_text(value, role).strip()
        if len(options) > len(LETTERS):
            raise BadRowError(f"there are {len(options)} options, and {len(LETTERS)} letters")
        # Without options any letter is allowed.
        allowed = LETTERS[: len(options)] or LETTERS
        letters = {answer.upper()} & set(allowed) if self.choice_answer != "text" else set()
        if self.choice_answer != "letter":
            letters |= {letter for letter, option in zip(LETTERS, options, strict=False) if option == answer}
        if len(letters) != 1:
            expected = f"one letter from A to {allowed[-1]}" + (", or one option" if options else "")
            hint = "; it means several: set choice_answer to letter or text" if len(letters) > 1 else ""
            raise BadRowError(f"{role} must be {expected}, is {short_repr(value)}{hint}")
        return letters.pop()

    def _parse_box(self, value: object, role: str) -> list[float]:
        box = parse_json(value) if isinstance(value, str) else value
        if not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)):
            raise BadRowError(f"{role} must be four finite numbers {self.box_format}, is {short_repr(value)}")
        x1, y1, x2, y2 = box
        if self.box_format == "xywh":
            x2, y2 = x1 + x2, y1 + y2
        if not (x1 < x2 and y1 < y2):
            raise BadRowError(f"{role} {box} is empty or inverted: it needs x1 < x2 and y1 < y2")
        self._check_inside([x1, y1, x2, y2], role, str(box))
        return [x1, y1, x2, y2]

    def _check_inside(self, coordinates: Sequence[float], role: str, written: str) -> None:
        largest = MAX_COORDINATE.get(self.coordinate_system, sys.float_info.max)
        if coordinates and (min(coordinates) < 0 or max(coordinates) > largest):
            raise BadRowError(f"{role} {written} lies outside the image in coordinates {self.coordinate_system}")


def make_answer_spec(
    answer_type: str, coordinates: str | None, box_format: BoxFormat = "xyxy", choice_answer: ChoiceAnswer | None = None
) -> AnswerSpec:
    """Return the spec that the options of a reader name.

    Raises:
        UserError: an unknown word; coordinates for a type that has none, or none for a type that needs them; `xywh` for
            a type whose boxes are not converted.
    """
    known_type = _parse_enum(AnswerType, answer_type, "answer_type")
    missing = coordinates is None and known_type in COORDINATE_TYPES
    superfluous = coordinates is not None and known_type not in POSSIBLE_COORDINATE_TYPES
    if missing or superfluous:
        types = ", ".join(sorted(COORDINATE_TYPES))
        raise UserError(
            f"answer_type={answer_type!r} with coordinates={coordinates!r}: set `coordinates` for {types}, and for "
            "json with coordinates in it"
        )
    if box_format == "xywh" and known_type in (AnswerType.ACTION, AnswerType.JSON):
        raise UserError(
            f"answer_type={answer_type!r} with box_format='xywh': only boxes of the types box and boxes are converted; "
            "write the boxes of others as x1, y1, x2, y2 into the data, and leave out `box_format`"
        )
    return AnswerSpec(
        answer_type=known_type,
        coordinate_system=None if coordinates is None else _parse_enum(CoordinateSystem, coordinates, "coordinates"),
        box_format=box_format,
        choice_answer=choice_answer,
    )


def check_text(value: object, role: str) -> str:
    """Return text that is not blank; raises BadRowError for anything else, and for a lone surrogate."""
    if not isinstance(value, str) or not value.strip():
        raise BadRowError(f"{role} must be text that is not empty, is {short_repr(value)}")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise BadRowError(f"{role} holds half of a surrogate pair: {short_repr(value)}")
    return value


def _to_xyxy(entry: AnswerValue) -> AnswerValue:
    # An entry of another form passes as it is: the parser of answers refuses it with its own message.
    match entry:
        case [x, y, width, height] if all(map(is_number, entry)):
            return [x, y, x + width, y + height]
        case {"bbox_2d": box}:
            return {**entry, "bbox_2d": _to_xyxy(box)}
        case _:
            return entry


def parse_json(text: str) -> object:
    """Return the value of a JSON text, None for any other text: every caller refuses it as a value of a wrong type."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _parse_enum(words: type[_EnumT], value: str, option: str) -> _EnumT:
    if value not in list(words):
        raise UserError(f"{option}={value!r} is unknown{did_you_mean(value, words)}; use {', '.join(words)}")
    return words(value)
