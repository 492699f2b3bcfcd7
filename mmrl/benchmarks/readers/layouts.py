"""How rows of benchmarks are read, whatever their layout.

A layout turns a row into the columns of canonical JSONL, which scoring reads, and what is to be seen with the question.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Protocol

from mmrl.types import Frame, ImageRef
from mmrl_datasets.formats.row import BadRowError, Cells, cell, has, shown
from mmrl_datasets.readers.columns import Column, column, optional
from mmrl_datasets.readers.media_resolver import Clip, MediaFiles, clip, rate
from mmrl_datasets.readers.row_to_sample import choices, literal

ROLES: Final = ("id", "question", "options", "answer", "precision", "unit", "cluster", "image_size")
_SEVERAL: Final = re.compile(r"\[\s*['\"]")
_LISTED: Final = re.compile(r"^\s*\(?([A-H])[.:)]\s*(.+?)\s*$", re.MULTILINE)
_WHOLE: Final = {Frame.NORM_1: 1.0, Frame.NORM_1000: 1000.0}
_ROUNDING: Final = 1.01
Named = Literal["each", "some", "parts"]
"""What the numbers in a question (`<image 2>`) name: each picture of the row, some, or parts of the only one."""


class Asked(NamedTuple):
    """A row: canonical columns, the media that go with it as cells name them or as they were `found`, whether options
    are still to be listed below the question, and what numbers in it name.
    """

    columns: dict[str, Any]
    images: object = None
    videos: object = None
    clip: Clip = (None, None)
    fps: float | None = None
    lists: bool = True
    found: Sequence[ImageRef] = ()
    named: Named = "each"


class Layout(Protocol):
    """One way in which rows are written."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def needs(self) -> frozenset[str]:
        """Columns that tell it from others; every row has them."""

    @property
    def asks_frame(self) -> bool:
        """Whether someone has to say what its boxes are measured in."""

    def read(self, cells: Cells, files: MediaFiles, file: str) -> Sequence[Asked]:
        """The questions of a row of `file`, a name without its ending. Raises BadRowError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns with fixed roles. Templates are Jinja over a row, as in data sources; `perhaps` are roles whose column
    a row may lack, `groups` columns that break results down.

    `corners` says how boxes are written; options that the question lists already are read from it where it `lists`
    them, and listed below it otherwise. Where the column `each` holds a list, each of its entries is a question of its
    own. `named` is what numbers in questions name, `marks` are columns that tell this table from others. `folders` has
    the folder of the videos by the name of the file that asks about them; those that are folders of frames have `fps`
    of them a second.
    """

    name: str
    roles: Mapping[str, Column]
    perhaps: Mapping[str, Column]
    kind: Column | str
    frame: str | None = None
    corners: str = "xyxy"
    groups: tuple[str, ...] = ()
    lists: bool = False
    each: str | None = None
    folders: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    fps: float | None = None
    named: Named = "each"
    marks: tuple[str, ...] = ()
    asks_frame: bool = False

    @property
    def needs(self) -> frozenset[str]:
        """The columns of all roles, and its marks."""
        kind: frozenset[str] = frozenset() if isinstance(self.kind, str) else self.kind.needs
        return kind.union(self.marks, *(role.needs for role in self.roles.values()))

    def read(self, cells: Cells, files: MediaFiles, file: str) -> Sequence[Asked]:
        """The questions of a row. Raises BadRowError."""
        if self.each is None:
            return (self._asked(cells, file),)
        entries = cell(cells, self.each)
        if not isinstance(entries, list) or not entries:
            raise BadRowError(f"{self.each} must be a list of texts that is not empty, is {shown(entries)}")
        asked = [self._asked({**cells, self.each: entry}, file) for entry in entries]
        for number, one in enumerate(asked, 1):
            one.columns["id"] = f"{one.columns['id']}-{number}"
        return asked

    def _asked(self, cells: Cells, file: str) -> Asked:
        given: dict[str, Any] = {role: one.of(cells) for role, one in self.roles.items()}
        given |= {role: optional(cells, one) for role, one in self.perhaps.items()}
        kind = self.kind if isinstance(self.kind, str) else str(self.kind.of(cells))
        whole = given.get("prompt")
        question = str(given.get("question") or "") if whole is None else str(whole)
        lists = self.lists or whole is not None
        meta = {name.rpartition(".")[2]: optional(cells, column(name, "groups")) for name in self.groups}
        columns = {role: given[role] for role in ROLES if given.get(role) is not None}
        columns |= {
            "question": question,
            "options": [*(listed_options(given.get("options"), question, lists=lists) if kind == "choice" else ())],
            "answer": due(given["answer"], self.corners),
            "answer_type": kind,
            "meta": {**meta, **(given.get("meta") or {})},
        }
        if (frame := given.get("frame", self.frame)) is not None:
            columns["frame"] = frame
            within(columns["answer"], frame)
        seen = clip(given.get("start"), given.get("end"))
        videos = given.get("videos")
        if file in self.folders:
            videos = f"{self.folders[file]}/{videos}"
        fps = rate(given.get("fps", self.fps))
        return Asked(columns, given.get("images"), videos, seen, fps, lists=not lists, named=self.named)


def due(answer: object, corners: str) -> object:
    """The right answer of a cell: boxes by their corners, and several texts, which tables write as a list, as one."""
    match answer:
        case [int() | float() as x, int() | float() as y, int() | float() as width, int() | float() as height]:
            return [x, y, x + width, y + height] if corners == "xywh" else answer
        case str() if _SEVERAL.match(answer):
            return literal(answer, "answer")
        case _:
            return answer


def within(answer: object, frame: object) -> object:
    """The answer; where it is a box, one that can be of this frame. Raises BadRowError."""
    if not isinstance(answer, list | tuple) or frame not in [*Frame]:
        return answer
    most = max((side for side in answer if isinstance(side, int | float)), default=None)
    whole = _WHOLE.get(Frame(str(frame)))
    if most is not None and most <= 1.0 and frame != Frame.NORM_1:
        raise BadRowError(f"the box {shown(answer)} is smaller than one unit of {frame}; is it in norm_1?")
    if most is not None and whole is not None and most > _ROUNDING * whole:
        raise BadRowError(f"the box {shown(answer)} lies outside of {frame}, which ends at {whole:g}")
    return answer


def listed_options(given: object, question: str, *, lists: bool) -> tuple[str, ...]:
    """The texts of the options, without letters; where the row has no column, those that the question `lists`, or the
    letters of such as stand in the picture.
    """
    if given is not None or not lists:
        options = choices(given)
        found = [match for match in map(_LISTED.fullmatch, options) if match]
    else:
        found = [*_LISTED.finditer(question)]
        options = tuple("ABCD")
    lettered = found and [match[1] for match in found] == [chr(ord("A") + place) for place in range(len(found))]
    whole = given is None or len(found) == len(options)
    return tuple(match[2] for match in found) if lettered and whole else options


def recognised(layouts: Sequence[Layout], cells: Cells) -> Layout:
    """The first layout whose columns are all there.

    Raises:
        BadRowError: there is none; the message names the nearest, and what it lacks.
    """
    nearest = min(layouts, key=lambda layout: len(_lacking(layout, cells)) / len(layout.needs))
    if lacking := _lacking(nearest, cells):
        raise BadRowError(
            f"the columns are {', '.join(cells)}; the nearest known layout is {nearest.name}, which needs "
            f"{', '.join(map(repr, lacking))} too"
        )
    return nearest


def _lacking(layout: Layout, cells: Cells) -> list[str]:
    """The columns that a row lacks for a layout."""
    return sorted(name for name in layout.needs if not has(cells, name))
