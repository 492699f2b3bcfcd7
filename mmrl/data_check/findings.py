"""The kinds of findings of a data check, and their severity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from mmrl.config.schema import DataConfig


class Severity(StrEnum):
    """Consequence of a finding for the run."""

    ERROR = "error"
    """The run would stop, or its held-out numbers would mean nothing."""
    WARNING = "warning"
    """The run would go on, but perhaps not as its author expects."""
    NOTE = "note"
    """Worth knowing."""


class FindingCode(StrEnum):
    """Kind of a finding; docs/data.md describes each."""

    SOURCE = "source"
    MODEL = "model"
    EMPTY = "empty"
    TOO_FEW = "too_few"
    ROW = "row"
    ID = "id"
    MEDIA = "media"
    REWARD = "reward"
    DEMONSTRATION = "demonstration"
    TEXT = "text"
    TOO_LONG = "too_long"
    OUTSIDE_IMAGE = "outside_image"
    LEAK = "leak"
    SHARED_MEDIA = "shared_media"
    CONTRADICTION = "contradiction"
    DUPLICATE = "duplicate"
    NEAR_DUPLICATE = "near_duplicate"


FINDING_TITLES: Final[Mapping[FindingCode, str]] = MappingProxyType(
    {
        FindingCode.SOURCE: "sources that cannot be read",
        FindingCode.MODEL: "prompts cannot be built without the model's processor",
        FindingCode.EMPTY: "splits without one usable sample",
        FindingCode.TOO_FEW: "stages that need more samples a step than there are",
        FindingCode.ROW: "rows that make no sample",
        FindingCode.ID: "ids that are not unique",
        FindingCode.MEDIA: "images and videos that cannot be used",
        FindingCode.REWARD: "samples that the rewards or the response format cannot score",
        FindingCode.DEMONSTRATION: "samples that a stage cannot imitate",
        FindingCode.TEXT: "text that the model would misread",
        FindingCode.TOO_LONG: "prompts that are too long",
        FindingCode.OUTSIDE_IMAGE: "answers outside their image",
        FindingCode.LEAK: "held-out questions that are trained on",
        FindingCode.SHARED_MEDIA: "held-out media that training shows too, with other questions or slightly changed",
        FindingCode.CONTRADICTION: "questions asked twice with different answers",
        FindingCode.DUPLICATE: "questions asked twice",
        FindingCode.NEAR_DUPLICATE: "training images that look like another",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFinding:
    """One finding of a data check."""

    code: FindingCode
    severity: Severity
    split: str
    """train, validation, test or `benchmark NAME`."""
    sample_id: str
    """Empty if the finding is about a whole split."""
    message: str
    other_id: str = ""
    """The other sample, if the finding is about two."""


def severity_of(code: FindingCode, data: DataConfig) -> Severity:
    """Return the severity of a kind of finding in a run with these settings."""
    match code:
        case FindingCode.ROW | FindingCode.MEDIA | FindingCode.TEXT:
            return Severity.ERROR if data.on_bad_sample == "stop" else Severity.WARNING
        case FindingCode.TOO_LONG:
            return Severity.ERROR if data.on_too_long == "stop" else Severity.WARNING
        case FindingCode.OUTSIDE_IMAGE | FindingCode.SHARED_MEDIA | FindingCode.CONTRADICTION | FindingCode.DUPLICATE:
            return Severity.WARNING
        case FindingCode.NEAR_DUPLICATE:
            return Severity.NOTE
    return Severity.ERROR
