"""Any dataset kept as JSON Lines: one object per line, pictures as files beside it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar

from mmrl.types import Frame, ImageRef, Kind, Part, Place, Reject, Sample, Target, UserError

REQUIRED: Final = ("question", "answer")
ROLES: Final = ("id", "images", *REQUIRED, "label", "thought")
MARKER: Final = "<image>"
LARGEST: Final[Mapping[Frame, float]] = {Frame.NORM_1: 1.0, Frame.NORM_1000: 1000.0}
_Choice = TypeVar("_Choice", bound=StrEnum)


class _BadRowError(Exception):
    """Why one row cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """What the file's columns mean, and where its pictures are."""

    columns: Mapping[str, str]
    kind: Kind
    frame: Frame | None
    image_root: Path


def rows(
    place: Place,
    *,
    split: str = "train",
    path: str,
    columns: Mapping[str, str],
    kind: str,
    frame: str | None = None,
    task: str | None = None,
    image_root: str = ".",
    limit: int | None = None,
) -> Iterator[Sample | Reject]:
    """Samples of a JSON Lines file; a line that makes none becomes a `Reject` that names file, line and reason.

    Options:
        split: part of the samples' ids, so that files of several splits may number their rows alike.
        path: the file, relative to `place.base`.
        columns: which column plays which role: question and answer, and optionally id, images (a path or a list),
            label and thought. Columns without a role go into `meta`. Where the question says `<image>`, a picture
            stands, and there are as many of these as pictures; otherwise the pictures come first.
        kind: text, choice, number or box: of the answer and the label.
        frame: what boxes are measured in; given for them and only for them.
        task: name of the task; the file's name when None.
        image_root: folder that pictures lie in, relative to `place.base`.
        limit: lines to read at most.

    Raises:
        UserError: no such file; an impossible option; a line that lacks a column.
    """
    file = place.base / path
    layout = _Layout(
        columns=_checked_roles(columns),
        kind=_one_of(Kind, kind, "kind"),
        frame=None if frame is None else _one_of(Frame, frame, "frame"),
        image_root=(place.base / image_root).resolve(),
    )
    if (layout.kind is Kind.BOX) != (layout.frame is not None):
        raise UserError(f"kind={kind!r} with frame={frame!r}: set `frame` for boxes and only for them")
    if not (file.is_file() and os.access(file, os.R_OK)):
        raise UserError(f"{file}: no such file that can be read; `path` is relative to {place.base}")
    return _read(file, layout, task or file.stem, split, limit)


def _read(file: Path, layout: _Layout, task: str, split: str, limit: int | None) -> Iterator[Sample | Reject]:
    seen: dict[str, int] = {}
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and number > limit:
                return
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                row = _parsed(line)
                name = f"{task}/{split}/{_identity(row, layout, number, where)}"
                if name in seen:
                    raise _BadRowError(f"the id {name!r} stands on line {seen[name]} too")
                seen[name] = number
                yield _sample(row, layout, name, task, where)
            except _BadRowError as problem:
                yield Reject(f"{task}/{split}/line-{number}", f"{where}: {problem}")


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise _BadRowError(f"not a line of JSON ({error})") from error
    if not isinstance(row, dict):
        raise _BadRowError(f"must be an object with the columns as keys, is {_named(row)}")
    return row


def _sample(row: dict[str, Any], layout: _Layout, name: str, task: str, where: str) -> Sample:
    given = {role: _cell(row, column, where) for role, column in layout.columns.items()}
    images = [_image(entry, layout.image_root) for entry in _entries(given.get("images"))]
    if layout.kind is Kind.BOX and not images:
        raise _BadRowError("a box needs a picture to lie in, and there is none")
    label = given.get("label")
    return Sample(
        id=name,
        task=task,
        parts=_parts(_text(given["question"], "question"), images),
        target=_target(given["answer"], "answer", layout),
        label=None if label is None else _target(label, "label", layout),
        thought=None if given.get("thought") is None else _text(given["thought"], "thought"),
        meta={column: value for column, value in row.items() if column not in layout.columns.values()},
    )


def _cell(row: Mapping[str, Any], column: str, where: str) -> object:
    if column not in row:
        raise UserError(
            f"{where}: there is no column {column!r}{_did_you_mean(column, row)}; there are {', '.join(row)}"
        )
    return row[column]


def _identity(row: Mapping[str, Any], layout: _Layout, number: int, where: str) -> str:
    if "id" not in layout.columns:
        return f"line-{number}"
    value = _cell(row, layout.columns["id"], where)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise _BadRowError(f"id must be text or a whole number, is {_named(value)}")
    return str(value)


def _parts(question: str, images: list[ImageRef]) -> tuple[Part, ...]:
    texts = question.split(MARKER)
    if len(texts) == 1:
        return (*images, question)
    if len(texts) - 1 != len(images):
        raise _BadRowError(f"the question says {MARKER} {len(texts) - 1} times, and there are {len(images)} pictures")
    parts: list[Part] = [texts[0]]
    for image, text in zip(images, texts[1:], strict=True):
        parts += [image, text]
    return tuple(part for part in parts if part != "")


def _entries(value: object) -> list[object]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _image(entry: object, root: Path) -> ImageRef:
    relative = _text(entry, "picture")
    try:
        file = (root / relative).resolve(strict=True)
        if not file.is_relative_to(root):
            raise _BadRowError(f"picture {relative!r} lies outside image_root {root}")
        with file.open("rb") as content:
            return ImageRef(path=str(file), sha256=hashlib.file_digest(content, "sha256").hexdigest())
    except FileNotFoundError as error:
        raise _BadRowError(f"picture {relative!r} is not under image_root {root}") from error
    except (OSError, ValueError) as error:
        raise _BadRowError(f"picture {relative!r} cannot be read: {error}") from error


def _target(value: object, role: str, layout: _Layout) -> Target:
    match layout.kind:
        case Kind.TEXT:
            return Target(kind=Kind.TEXT, value=_text(value, role))
        case Kind.NUMBER:
            if not _is_number(value):
                raise _BadRowError(f"{role} must be a finite number, is {_named(value)}")
            return Target(kind=Kind.NUMBER, value=value)
        case Kind.CHOICE:
            letter = _text(value, role).upper()
            if len(letter) != 1 or not "A" <= letter <= "Z":
                raise _BadRowError(f"{role} must be one letter from A to Z, is {_named(value)}")
            return Target(kind=Kind.CHOICE, value=letter)
        case Kind.BOX:
            return Target(kind=Kind.BOX, value=_box(value, role, layout.frame), frame=layout.frame)


def _box(value: object, role: str, frame: Frame | None) -> list[float]:
    if not isinstance(value, list) or len(value) != 4 or not all(_is_number(corner) for corner in value):
        raise _BadRowError(f"{role} must be four finite numbers [x1, y1, x2, y2], is {_named(value)}")
    x1, y1, x2, y2 = value
    if not (x1 < x2 and y1 < y2):
        raise _BadRowError(f"{role} {value} is empty or inverted: it needs x1 < x2 and y1 < y2")
    largest = LARGEST.get(frame, sys.float_info.max) if frame else sys.float_info.max
    if min(value) < 0 or max(value) > largest:
        raise _BadRowError(f"{role} {value} leaves the picture in frame {frame}")
    return value


def _text(value: object, role: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _BadRowError(f"{role} must be text that is not empty, is {_named(value)}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _named(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _checked_roles(columns: Mapping[str, str]) -> Mapping[str, str]:
    for role, column in columns.items():
        if role not in ROLES:
            raise UserError(f"columns: unknown role {role!r}{_did_you_mean(role, ROLES)}; there are {', '.join(ROLES)}")
        if not isinstance(column, str):
            raise UserError(f"columns: {role} must name a column, is {_named(column)}")
    missing = [role for role in REQUIRED if role not in columns]
    if missing:
        raise UserError(f"columns: say which column is the {' and which the '.join(missing)}")
    return columns


def _one_of(choices: type[_Choice], value: str, option: str) -> _Choice:
    for choice in choices:
        if choice == value:
            return choice
    raise UserError(f"{option}={value!r} is unknown{_did_you_mean(value, choices)}; use {', '.join(choices)}")


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
