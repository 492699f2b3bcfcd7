"""Right answers as rows give them: checked, and nothing guessed."""

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
from mmrl_datasets.formats.row import BadRowError, did_you_mean, short_repr

MAX_COORDINATE: Final[Mapping[CoordinateSystem | None, float]] = {
    CoordinateSystem.NORM_1: 1.0,
    CoordinateSystem.NORM_1000: 1000.0,
}
LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NUMBER_PATTERN: Final = re.compile(r"[+-]?\d{1,300}(\.\d+)?", re.ASCII)
BoxFormat = Literal["xyxy", "xywh"]
_EnumT = TypeVar("_EnumT", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSpec:
    """What the answers of a source are. `corners` says how its boxes are written; targets are always x1, y1, x2, y2."""

    answer_type: AnswerType
    coordinate_system: CoordinateSystem | None = None
    box_format: BoxFormat = "xyxy"

    def parse_target(self, value: object, role: str, options: Sequence[str] = ()) -> Target:
        """The target that a cell holds; `options` are those of a multiple choice question, A first.

        Raises:
            BadRowError: it holds none of this kind.
        """
        match self.answer_type:
            case AnswerType.TEXT:
                return Target(answer_type=AnswerType.TEXT, value=check_text(value, role))
            case AnswerType.NUMBER:
                return Target(answer_type=AnswerType.NUMBER, value=_parse_number(value, role))
            case AnswerType.CHOICE:
                return Target(answer_type=AnswerType.CHOICE, value=_parse_letter(value, role, options))
            case AnswerType.BOX:
                return Target(
                    answer_type=AnswerType.BOX,
                    value=self._parse_box(value, role),
                    coordinate_system=self.coordinate_system,
                )
            case _:
                return Target(
                    answer_type=self.answer_type,
                    value=self._parse_value(value, role),
                    coordinate_system=self.coordinate_system,
                )

    def _parse_value(self, cell: object, role: str) -> AnswerValue:
        """What a cell of any other kind holds, as JSON or in the form that an answer has."""
        if self.answer_type is AnswerType.BOXES and self.box_format == "xywh":
            entries = _parse_json(cell) if isinstance(cell, str) else cell
            cell = [_to_xyxy(entry) for entry in entries] if isinstance(entries, list) else cell
        try:
            value = (
                parse_answer_value(self.answer_type, cell.strip())
                if isinstance(cell, str)
                else validate_value(self.answer_type, cell)
            )
        except ValueError as error:
            raise BadRowError(
                f"{role} must be {ANSWER_PLACEHOLDERS[self.answer_type]}: {error}: {short_repr(cell)}"
            ) from error
        numbers = (
            [number for place in list_coordinates(self.answer_type, value) for number in place]
            if self.coordinate_system
            else []
        )
        if numbers and (
            min(numbers) < 0 or max(numbers) > MAX_COORDINATE.get(self.coordinate_system, sys.float_info.max)
        ):
            raise BadRowError(f"{role} {short_repr(cell)} leaves the picture in frame {self.coordinate_system}")
        return value

    def _parse_box(self, value: object, role: str) -> list[float]:
        box = _parse_json(value) if isinstance(value, str) else value
        if not isinstance(box, list) or len(box) != 4 or not all(is_number(number) for number in box):
            raise BadRowError(f"{role} must be four finite numbers {self.box_format}, is {short_repr(value)}")
        x1, y1, x2, y2 = box
        if self.box_format == "xywh":
            x2, y2 = x1 + x2, y1 + y2
        if not (x1 < x2 and y1 < y2):
            raise BadRowError(f"{role} {box} is empty or inverted: it needs {'x1 < x2 and y1 < y2'}")
        if min(x1, y1) < 0 or max(x2, y2) > MAX_COORDINATE.get(self.coordinate_system, sys.float_info.max):
            raise BadRowError(f"{role} {box} leaves the picture in frame {self.coordinate_system}")
        return [x1, y1, x2, y2]


def make_answer_spec(kind: str, frame: str | None, corners: BoxFormat = "xyxy") -> AnswerSpec:
    """The form that options name.

    Raises:
        UserError: an unknown word, or a frame for what has no coordinates.
    """
    known = _parse_enum(AnswerType, kind, "kind")
    misfit = known in COORDINATE_TYPES if frame is None else known not in POSSIBLE_COORDINATE_TYPES
    if misfit:
        framed = ", ".join(sorted(COORDINATE_TYPES))
        raise UserError(
            f"kind={kind!r} with frame={frame!r}: set `frame` for {framed}, and for json with coordinates in it"
        )
    return AnswerSpec(
        answer_type=known,
        coordinate_system=None if frame is None else _parse_enum(CoordinateSystem, frame, "frame"),
        box_format=corners,
    )


def check_text(value: object, role: str) -> str:
    """Text with something in it.

    Raises:
        BadRowError: it is none, or not all of it is Unicode.
    """
    if not isinstance(value, str) or not value.strip():
        raise BadRowError(f"{role} must be text that is not empty, is {short_repr(value)}")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise BadRowError(f"{role} holds half of a surrogate pair: {short_repr(value)}")
    return value


def _parse_number(value: object, role: str) -> float:
    number = value
    if isinstance(value, str) and NUMBER_PATTERN.fullmatch(value.strip()):
        number = float(value) if "." in value else int(value)
    if not is_number(number):
        raise BadRowError(f"{role} must be a finite number, is {short_repr(value)}")
    return number


def _parse_letter(value: object, role: str, options: Sequence[str]) -> str:
    answer = check_text(value, role).strip()
    if len(options) > len(LETTERS):
        raise BadRowError(f"there are {len(options)} options, and {len(LETTERS)} letters")
    named = {letter for letter in LETTERS if letter == answer.upper()}
    quoted = {letter for letter, option in zip(LETTERS, options, strict=False) if option == answer}
    letters = (named & set(LETTERS[: len(options)]) if options else named) | quoted
    if len(letters) != 1:
        wanted = f"one letter from A to {LETTERS[: len(options)][-1:] or 'Z'}" + (", or one option" if options else "")
        raise BadRowError(f"{role} must be {wanted}, is {short_repr(value)}")
    return letters.pop()


def _to_xyxy(entry: AnswerValue) -> AnswerValue:
    """An entry of a list of boxes, x, y, width, height before and x1, y1, x2, y2 after; left as it is if it is none."""
    match entry:
        case [x, y, width, height] if all(map(is_number, entry)):
            return [x, y, x + width, y + height]
        case {"bbox_2d": box}:
            return {**entry, "bbox_2d": _to_xyxy(box)}
        case _:
            return entry


def _parse_json(written: str) -> object:
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return None


def _parse_enum(words: type[_EnumT], value: str, option: str) -> _EnumT:
    for word in words:
        if word == value:
            return word
    raise UserError(f"{option}={value!r} is unknown{did_you_mean(value, words)}; use {', '.join(words)}")
