"""What an examination finds, and how bad each thing is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from mmrl.config.schema import DataConfig


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"  # the run would stop, or its held-out numbers would mean nothing
    WARNING = "warning"  # the run would go on, but perhaps not as its author thinks
    NOTE = "note"  # worth knowing


class FindingCode(StrEnum):
    """What kind of thing was found."""

    SOURCE = "source"
    MODEL = "model"
    EMPTY = "empty"
    TOO_FEW = "too_few"
    ROW = "row"
    ID = "id"
    MEDIUM = "medium"
    REWARD = "reward"
    DEMONSTRATION = "lesson"
    TEXT = "text"
    TOO_LONG = "too_long"
    OUT_OF_FRAME = "outside"
    LEAK = "leak"
    SHARED_MEDIUM = "shared_medium"
    CONTRADICTION = "contradiction"
    DUPLICATE = "duplicate"
    NEAR_DUPLICATE = "near_duplicate"


FINDING_TITLES: Final[Mapping[FindingCode, str]] = MappingProxyType(
    {
        FindingCode.SOURCE: "sources that cannot be read",
        FindingCode.MODEL: "prompts cannot be made without the model's processor",
        FindingCode.EMPTY: "parts without one usable sample",
        FindingCode.TOO_FEW: "stages that ask more samples a step than there are",
        FindingCode.ROW: "rows that make no sample",
        FindingCode.ID: "ids that are not unique",
        FindingCode.MEDIUM: "media that cannot be used",
        FindingCode.REWARD: "samples that the rewards or the answer grammar cannot judge",
        FindingCode.DEMONSTRATION: "samples that a stage cannot imitate",
        FindingCode.TEXT: "text that the model would misread",
        FindingCode.TOO_LONG: "prompts that are too long",
        FindingCode.OUT_OF_FRAME: "answers outside their picture",
        FindingCode.LEAK: "held-out questions that are trained on",
        FindingCode.SHARED_MEDIUM: "held-out media that training shows too, with other questions or slightly changed",
        FindingCode.CONTRADICTION: "questions asked twice with different answers",
        FindingCode.DUPLICATE: "questions asked twice",
        FindingCode.NEAR_DUPLICATE: "training pictures that look like another",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFinding:
    """One thing found. `sample` is empty where it is about a whole part; `other` is a second sample it is about."""

    code: FindingCode
    severity: Severity
    part: str
    sample: str
    message: str
    other: str = ""


def severity_of(code: FindingCode, data: DataConfig) -> Severity:
    """How bad something is in a run with these data settings."""
    match code:
        case FindingCode.ROW | FindingCode.MEDIUM | FindingCode.TEXT:
            return Severity.ERROR if data.on_bad_sample == "stop" else Severity.WARNING
        case FindingCode.TOO_LONG:
            return Severity.ERROR if data.on_too_long == "stop" else Severity.WARNING
        case FindingCode.OUT_OF_FRAME | FindingCode.SHARED_MEDIUM | FindingCode.CONTRADICTION | FindingCode.DUPLICATE:
            return Severity.WARNING
        case FindingCode.NEAR_DUPLICATE:
            return Severity.NOTE
    return Severity.ERROR
