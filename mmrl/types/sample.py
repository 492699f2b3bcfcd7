"""Samples of a dataset and their targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from mmrl.types.media import ContentPart, CoordinateSystem, ImageRef, MediaRef


class AnswerType(StrEnum):
    """What an answer is, hence how it is written, parsed and compared; beside each, the Python value it parses to."""

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
    JSON = "json"  # what json.loads gives
    LATEX = "latex"  # str, without delimiters
    SVG = "svg"  # str, one <svg> element
    TOOL_CALL = "tool_call"  # Action


class Region(NamedTuple):
    """A box or a point with what it is called and how sure the model is, where it says so."""

    coordinates: tuple[float, ...]
    label: str = ""
    confidence: float | None = None


class Action(NamedTuple):
    """Something to do, such as `click`, and its arguments; coordinates in them are in the frame of the answer."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The right answer. `frame` is set for coordinates and only for them; they belong to the sample's medium number
    `medium`, counted from 0 in reading order.
    """

    answer_type: AnswerType
    value: Any
    coordinate_system: CoordinateSystem | None = None
    media_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One question of a dataset. `target` is what rewards check; `label` is what an annotator wrote, and `response` a
    whole response in the model's own format and frame: for imitation.
    """

    id: str
    task: str
    parts: tuple[ContentPart, ...]
    target: Target
    label: Target | None = None
    thinking: str | None = None
    response: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """The pictures alone, in reading order."""
        return tuple(part for part in self.parts if isinstance(part, ImageRef))

    @property
    def media(self) -> tuple[MediaRef, ...]:
        """The pictures and videos, in reading order."""
        return tuple(part for part in self.parts if not isinstance(part, str))


class RejectedRow(NamedTuple):
    """A row a dataset could not turn into a sample, and why."""

    id: str
    reason: str
