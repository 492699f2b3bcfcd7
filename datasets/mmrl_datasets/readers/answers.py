"""Right answers as rows give them: checked, and nothing guessed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, TypeVar

from mmrl.answer import FORMS, FRAMED, MAY_BE_FRAMED, Value, checked, places, read
from mmrl.answer.values import is_number
from mmrl.types import Frame, Kind, Target, UserError
from mmrl_datasets.formats.row import BadRowError, did_you_mean, shown

LARGEST: Final[Mapping[Frame | None, float]] = {Frame.NORM_1: 1.0, Frame.NORM_1000: 1000.0}
LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NUMERAL: Final = re.compile(r"[+-]?\d{1,300}(\.\d+)?", re.ASCII)
Corners = Literal["xyxy", "xywh"]
_Word = TypeVar("_Word", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """What the answers of a source are. `corners` says how its boxes are written; targets are always x1, y1, x2, y2."""

    kind: Kind
    frame: Frame | None = None
    corners: Corners = "xyxy"

    def target(self, value: object, role: str, options: Sequence[str] = ()) -> Target:
        """The target that a cell holds; `options` are those of a multiple choice question, A first.

        Raises:
            BadRowError: it holds none of this kind.
        """
        match self.kind:
            case Kind.TEXT:
                return Target(kind=Kind.TEXT, value=text(value, role))
            case Kind.NUMBER:
                return Target(kind=Kind.NUMBER, value=_number(value, role))
            case Kind.CHOICE:
                return Target(kind=Kind.CHOICE, value=_letter(value, role, options))
            case Kind.BOX:
                return Target(kind=Kind.BOX, value=self._box(value, role), frame=self.frame)
            case _:
                return Target(kind=self.kind, value=self._value(value, role), frame=self.frame)

    def _value(self, cell: object, role: str) -> Value:
        """What a cell of any other kind holds, as JSON or in the form that an answer has."""
        if self.kind is Kind.BOXES and self.corners == "xywh":
            entries = _parsed(cell) if isinstance(cell, str) else cell
            cell = [_cornered(entry) for entry in entries] if isinstance(entries, list) else cell
        try:
            value = read(self.kind, cell.strip()) if isinstance(cell, str) else checked(self.kind, cell)
        except ValueError as error:
            raise BadRowError(f"{role} must be {FORMS[self.kind]}: {error}: {shown(cell)}") from error
        numbers = [number for place in places(self.kind, value) for number in place] if self.frame else []
        if numbers and (min(numbers) < 0 or max(numbers) > LARGEST.get(self.frame, sys.float_info.max)):
            raise BadRowError(f"{role} {shown(cell)} leaves the picture in frame {self.frame}")
        return value

    def _box(self, value: object, role: str) -> list[float]:
        box = _parsed(value) if isinstance(value, str) else value
        if not isinstance(box, list) or len(box) != 4 or not all(is_number(number) for number in box):
            raise BadRowError(f"{role} must be four finite numbers {self.corners}, is {shown(value)}")
        x1, y1, x2, y2 = box
        if self.corners == "xywh":
            x2, y2 = x1 + x2, y1 + y2
        if not (x1 < x2 and y1 < y2):
            raise BadRowError(f"{role} {box} is empty or inverted: it needs {'x1 < x2 and y1 < y2'}")
        if min(x1, y1) < 0 or max(x2, y2) > LARGEST.get(self.frame, sys.float_info.max):
            raise BadRowError(f"{role} {box} leaves the picture in frame {self.frame}")
        return [x1, y1, x2, y2]


def answer_form(kind: str, frame: str | None, corners: Corners = "xyxy") -> AnswerForm:
    """The form that options name.

    Raises:
        UserError: an unknown word, or a frame for what has no coordinates.
    """
    known = _one_of(Kind, kind, "kind")
    misfit = known in FRAMED if frame is None else known not in MAY_BE_FRAMED
    if misfit:
        framed = ", ".join(sorted(FRAMED))
        raise UserError(
            f"kind={kind!r} with frame={frame!r}: set `frame` for {framed}, and for json with coordinates in it"
        )
    return AnswerForm(kind=known, frame=None if frame is None else _one_of(Frame, frame, "frame"), corners=corners)


def text(value: object, role: str) -> str:
    """Text with something in it.

    Raises:
        BadRowError: it is none, or not all of it is Unicode.
    """
    if not isinstance(value, str) or not value.strip():
        raise BadRowError(f"{role} must be text that is not empty, is {shown(value)}")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise BadRowError(f"{role} holds half of a surrogate pair: {shown(value)}")
    return value


def _number(value: object, role: str) -> float:
    number = value
    if isinstance(value, str) and NUMERAL.fullmatch(value.strip()):
        number = float(value) if "." in value else int(value)
    if not is_number(number):
        raise BadRowError(f"{role} must be a finite number, is {shown(value)}")
    return number


def _letter(value: object, role: str, options: Sequence[str]) -> str:
    answer = text(value, role).strip()
    if len(options) > len(LETTERS):
        raise BadRowError(f"there are {len(options)} options, and {len(LETTERS)} letters")
    named = {letter for letter in LETTERS if letter == answer.upper()}
    quoted = {letter for letter, option in zip(LETTERS, options, strict=False) if option == answer}
    letters = (named & set(LETTERS[: len(options)]) if options else named) | quoted
    if len(letters) != 1:
        wanted = f"one letter from A to {LETTERS[: len(options)][-1:] or 'Z'}" + (", or one option" if options else "")
        raise BadRowError(f"{role} must be {wanted}, is {shown(value)}")
    return letters.pop()


def _cornered(entry: Value) -> Value:
    """An entry of a list of boxes, x, y, width, height before and x1, y1, x2, y2 after; left as it is if it is none."""
    match entry:
        case [x, y, width, height] if all(map(is_number, entry)):
            return [x, y, x + width, y + height]
        case {"bbox_2d": box}:
            return {**entry, "bbox_2d": _cornered(box)}
        case _:
            return entry


def _parsed(written: str) -> object:
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return None


def _one_of(words: type[_Word], value: str, option: str) -> _Word:
    for word in words:
        if word == value:
            return word
    raise UserError(f"{option}={value!r} is unknown{did_you_mean(value, words)}; use {', '.join(words)}")
