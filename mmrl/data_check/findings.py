"""What an examination finds, and how bad each thing is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from mmrl.config.schema import Data


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"  # the run would stop, or its held-out numbers would mean nothing
    WARNING = "warning"  # the run would go on, but perhaps not as its author thinks
    NOTE = "note"  # worth knowing


class Code(StrEnum):
    """What kind of thing was found."""

    SOURCE = "source"
    MODEL = "model"
    EMPTY = "empty"
    TOO_FEW = "too_few"
    ROW = "row"
    ID = "id"
    MEDIUM = "medium"
    REWARD = "reward"
    LESSON = "lesson"
    TEXT = "text"
    TOO_LONG = "too_long"
    OUTSIDE = "outside"
    LEAK = "leak"
    SHARED_MEDIUM = "shared_medium"
    CONTRADICTION = "contradiction"
    DUPLICATE = "duplicate"
    NEAR_DUPLICATE = "near_duplicate"


TITLES: Final[Mapping[Code, str]] = MappingProxyType(
    {
        Code.SOURCE: "sources that cannot be read",
        Code.MODEL: "prompts cannot be made without the model's processor",
        Code.EMPTY: "parts without one usable sample",
        Code.TOO_FEW: "stages that ask more samples a step than there are",
        Code.ROW: "rows that make no sample",
        Code.ID: "ids that are not unique",
        Code.MEDIUM: "media that cannot be used",
        Code.REWARD: "samples that the rewards or the answer grammar cannot judge",
        Code.LESSON: "samples that a stage cannot imitate",
        Code.TEXT: "text that the model would misread",
        Code.TOO_LONG: "prompts that are too long",
        Code.OUTSIDE: "answers outside their picture",
        Code.LEAK: "held-out questions that are trained on",
        Code.SHARED_MEDIUM: "held-out media that training shows too, with other questions or slightly changed",
        Code.CONTRADICTION: "questions asked twice with different answers",
        Code.DUPLICATE: "questions asked twice",
        Code.NEAR_DUPLICATE: "training pictures that look like another",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing found. `sample` is empty where it is about a whole part; `other` is a second sample it is about."""

    code: Code
    severity: Severity
    part: str
    sample: str
    message: str
    other: str = ""


def severity(code: Code, data: Data) -> Severity:
    """How bad something is in a run with these data settings."""
    match code:
        case Code.ROW | Code.MEDIUM | Code.TEXT:
            return Severity.ERROR if data.bad_sample == "stop" else Severity.WARNING
        case Code.TOO_LONG:
            return Severity.ERROR if data.over_long == "reject_at_load" else Severity.WARNING
        case Code.OUTSIDE | Code.SHARED_MEDIUM | Code.CONTRADICTION | Code.DUPLICATE:
            return Severity.WARNING
        case Code.NEAR_DUPLICATE:
            return Severity.NOTE
    return Severity.ERROR
