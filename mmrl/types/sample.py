"""Samples of a dataset, and their targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from mmrl.types.media import ContentPart, CoordinateSystem, ImageRef, MediaRef


class AnswerType(StrEnum):
    """Type of an answer, which decides how it is written, parsed and compared. Beside each, its Python value."""

    TEXT = "text"  # str
    CHOICE = "choice"  # str, one upper-case letter
    NUMBER = "number"  # int | float, finite
    BOX = "box"  # (x1, y1, x2, y2)
    BOXES = "boxes"  # tuple[Region, ...], four coordinates each
    POINT = "point"  # (x, y)
    POINTS = "points"  # tuple[Region, ...], two coordinates each
    SPAN = "span"  # (start, end), seconds
    SPANS = "spans"  # tuple of (start, end), seconds
    PERMUTATION = "permutation"  # tuple[int, ...], a bijection of 1..n
    ACTION = "action"  # Action
    LIST = "list"  # tuple[str, ...]
    JSON = "json"  # any value of json.loads
    LATEX = "latex"  # str, without delimiters
    SVG = "svg"  # str, one <svg> element
    TOOL_CALL = "tool_call"  # Action


class Region(NamedTuple):
    """A box or point among several.

    Example: `Region((10.0, 20.0, 40.0, 60.0), label="cat", confidence=0.9)`
    """

    coordinates: tuple[float, ...]
    """x1, y1, x2, y2 of a box, or x, y of a point."""
    label: str = ""
    """Name of the object; empty if it has none."""
    confidence: float | None = None
    """The model's own confidence, if it gives one."""


class Action(NamedTuple):
    """An action on a screen, or a tool call.

    Example: `Action("click", {"point": (120, 40)})`
    """

    name: str
    arguments: Mapping[str, Any]
    """Arguments by name; coordinates in them are in the coordinate system of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Correct answer to a sample.

    Example: `Target(answer_type=AnswerType.NUMBER, value=3)`
    """

    answer_type: AnswerType
    value: Any
    """The answer as the Python value of its type."""
    coordinate_system: CoordinateSystem | None = None
    """Units of the coordinates in `value`; None for a value without any."""
    media_index: int = 0
    """Which image or video of the sample the coordinates refer to, from 0 in reading order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One question of a dataset, with its correct answer.

    Example: `Sample(id="count-7", task="count", parts=(ImageRef(...), "How many red dots?"), target=Target(...))`
    """

    id: str
    """Unique within a run. Random draws derive from it."""
    task: str
    """Name of the task: metrics are grouped by it, and rewards can be restricted to it."""
    parts: tuple[ContentPart, ...]
    """The question: text, images and videos, in reading order."""
    target: Target
    """The correct answer, which rewards compare with."""
    label: Target | None = None
    """An annotator's answer, correct or not, for supervised training."""
    thinking: str | None = None
    """Thinking that leads to the answer, for supervised training."""
    response: str | None = None
    """A whole response in the model's own format and coordinate system, for supervised training."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the dataset's row, which `when`, row filters and orders can refer to."""

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """Images, without videos, in reading order."""
        return tuple(part for part in self.parts if isinstance(part, ImageRef))

    @property
    def media(self) -> tuple[MediaRef, ...]:
        """Images and videos, in reading order."""
        return tuple(part for part in self.parts if not isinstance(part, str))


class RejectedRow(NamedTuple):
    """A row of a dataset that could not be turned into a sample.

    Example: `RejectedRow("count-8", "8.png: no such file")`
    """

    id: str
    reason: str
    """What is wrong with the row, in one line."""
