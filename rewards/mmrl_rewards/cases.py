"""Reads case tables and scores them. A table lists responses for a reward, with the value each must get and why.

A table is a JSON list of rows, each a `Case`. It tests the reward and documents it.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from mmrl.answer import ResponseFormat
from mmrl.types import (
    AnswerType,
    CoordinateSystem,
    FinishReason,
    ImageRef,
    ResizeMap,
    Response,
    Sample,
    Size,
    Target,
    Turn,
    Unscorable,
    UserError,
    VideoRef,
)
from mmrl.utils.digests import file_digest
from mmrl_rewards.contract import BoundReward, describe_error, value_and_reason

_ModelT = TypeVar("_ModelT")
_RESPONSE_FORMAT_ADAPTER: TypeAdapter[ResponseFormat] = TypeAdapter(ResponseFormat)


class _CaseModel(BaseModel):
    """Configures the models of a table: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, row: object) -> object:
        # Runs before pydantic's own check, which would report the missing key before the misspelled one.
        unknown = sorted(row.keys() - cls.model_fields.keys()) if isinstance(row, dict) else []
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r}; known keys: {', '.join(cls.model_fields)}")
        return row


def _resolve_file(path: str, info: ValidationInfo) -> str:
    return str(((info.context or {}).get("folder", Path()) / path).absolute())


CaseFile = Annotated[str, AfterValidator(_resolve_file)]
"""Path of an image or video, relative to the folder of the table."""


class CaseMedium(_CaseModel):
    """Describes an image or video of a case, for rewards that look by its file."""

    type: Literal["image", "video"] = "image"
    file: CaseFile | None = None  # rewards that look open it; None for a medium that exists only in name
    size: tuple[int, int] | None = None  # width and height in pixels, before resizing; None for the file's
    resized: tuple[int, int] | None = None  # width and height in pixels after resizing; None for the same
    duration: float | None = None  # seconds of a video

    @model_validator(mode="after")
    def _check_size_known(self) -> CaseMedium:
        if self.file is None and self.size is None:
            raise ValueError("give `file` or `size`")
        return self

    def build(self) -> ImageRef | VideoRef:
        """Return the reference that the sample holds."""
        path, sha256 = self.file or ("case.png" if self.type == "image" else "case.mp4"), ""
        # A file that is missing is left to the reward to find: that may be what the row is about.
        if self.file is not None and Path(self.file).is_file():
            sha256 = file_digest(Path(self.file))
        if self.type == "image":
            return ImageRef(path=path, sha256=sha256)
        return VideoRef(path=path, sha256=sha256, start=0.0 if self.duration else None, end=self.duration)


class CaseSample(_CaseModel):
    """Describes the sample of a case. `image` and `resized` abbreviate `media` with one image."""

    answer_type: AnswerType  # of the target
    value: Any  # of the target
    coordinates: CoordinateSystem | None = None  # of the target
    media_index: int = 0  # of the image or video that the target lies in, from 0
    image: tuple[int, int] | CaseFile | None = None  # width and height in pixels, or a file
    resized: tuple[int, int] | None = None  # width and height of the image after resizing
    media: tuple[CaseMedium, ...] = ()
    question: str = "question"
    label: Any = None  # the value that an annotator wrote, where it is not the target's
    thinking: str | None = None  # of the sample's demonstration
    meta: dict[str, Any] = {}  # all other columns of the row

    @model_validator(mode="after")
    def _check_media_given_once(self) -> CaseSample:
        if self.image and self.media:
            raise ValueError("give `media` or `image`, not both")
        return self

    def all_media(self) -> tuple[CaseMedium, ...]:
        """Return the media, written either as `media` or as `image`."""
        if isinstance(self.image, str):
            return (CaseMedium(file=self.image, resized=self.resized),)
        return (CaseMedium(size=self.image, resized=self.resized),) if self.image else self.media

    def build(self) -> Sample:
        """Return the sample that the reward receives.

        Its label has the answer type and the coordinate system of the target.
        """
        target = Target(
            answer_type=self.answer_type,
            value=self.value,
            coordinate_system=self.coordinates,
            media_index=self.media_index,
        )
        return Sample(
            id="case",
            task="case",
            parts=(*(medium.build() for medium in self.all_media()), self.question),
            target=target,
            label=None if self.label is None else replace(target, value=self.label),
            thinking=self.thinking,
            meta=self.meta,
        )


class CaseResult(NamedTuple):
    """Reports how a reward scored a case."""

    value: float | Literal["unscorable"] | None  # None when the reward raised an error or returned no number
    reason: str  # the reward's own reason, or the error
    passed: bool  # the value is the expected one


class Case(_CaseModel):
    """Describes one row of a table: a response, its sample and the expected value."""

    fn: str  # name of the reward; `./my_rewards.py:my_fn` names a file beside the table
    args: dict[str, Any] = {}  # options of the reward
    sample: CaseSample
    response: str  # text of the model
    opening: str = ""  # text of the response that the chat template writes, such as "<think>\n"
    repeat: int = Field(default=1, ge=0)  # times that the text is repeated, for long responses
    coordinates: CoordinateSystem = CoordinateSystem.PX_ORIGINAL  # of the response
    thinking: Literal["none", "optional", "required"] = "optional"
    response_format: dict[str, Any] = {}  # other settings of the format that the response is parsed by
    finish_reason: FinishReason = FinishReason.EOS
    turns: tuple[Turn, ...] = ()  # actions in an environment
    shown: tuple[tuple[int, int], ...] = ()  # width and height of each part of an image that a tool showed
    tokens: int | None = None  # length of the response; by default, its number of words
    expected: float | Literal["unscorable"]
    tolerance: float = 1e-6  # difference from `expected` that is still equal
    source: str  # where the expected value comes from: a paper, a rule, an arithmetic

    @field_validator("response_format")
    @classmethod
    def _check_response_format(cls, response_format: dict[str, Any]) -> dict[str, Any]:
        known = {field.name for field in fields(ResponseFormat)}
        unknown = sorted(response_format.keys() - known)
        if unknown:
            raise ValueError(f"a response format has no {unknown[0]!r}")
        _RESPONSE_FORMAT_ADAPTER.validate_python(response_format)
        return response_format

    def build(self) -> tuple[Response, Sample]:
        """Return the response and the sample that the reward is called with.

        Raises:
            Unscorable: the row leaves the size of a medium to its file, which cannot be opened.
        """
        text = self.opening + self.response * self.repeat
        response_format = _RESPONSE_FORMAT_ADAPTER.validate_python({"thinking": self.thinking, **self.response_format})
        sample = self.sample.build()
        resize_maps = []
        for index, medium in enumerate(self.sample.all_media()):
            size = sample.media_size(index) if medium.size is None else Size(*medium.size)
            resize_maps.append(ResizeMap(size, Size(*(medium.resized or size))))
        response = Response(
            text=text,
            answer=response_format.parse(text, self.sample.answer_type),
            finish_reason=self.finish_reason,
            num_tokens=len(text.split()) if self.tokens is None else self.tokens,
            resize_maps=tuple(resize_maps),
            coordinate_system=self.coordinates,
            tool_resize_maps=tuple(ResizeMap(Size(*size), Size(*size)) for size in self.shown),
            num_turns=max(1, len(self.turns)),
            turns=self.turns,
        )
        return response, sample

    def score(self, reward: BoundReward) -> CaseResult:
        """Score the case. Any error of the reward other than `Unscorable` fails the case instead of being raised."""
        try:
            result = reward(*self.build())
        except Unscorable as error:
            return CaseResult("unscorable", str(error), self.expected == "unscorable")
        except (Exception, SystemExit) as error:  # noqa: BLE001
            return CaseResult(None, describe_error(reward.reward, error), False)
        value, reason = value_and_reason(result, "no reason given")
        if not isinstance(value, int | float):
            return CaseResult(None, f"returned {value!r:.80}, which is not a number", False)
        if not reward.reward.low <= value <= reward.reward.high:
            low, high = reward.reward.low, reward.reward.high
            return CaseResult(None, f"returned {value:g}, outside its range, {low:g} to {high:g}", False)
        passed = self.expected != "unscorable" and abs(value - self.expected) <= self.tolerance
        return CaseResult(value, reason, passed)

    def failure_message(self, reward: BoundReward) -> str:
        """Score the case and describe the difference from the expected value. Return "" if the case passes."""
        result = self.score(reward)
        if result.passed:
            return ""
        if result.value == "unscorable":
            return f"expected {self.expected}, but it is unscorable: {result.reason}; source: {self.source}"
        return f"expected {self.expected}, got {result.value} ({result.reason}); source: {self.source}"


def load_case_table(path: Path) -> tuple[Case, ...]:
    """Read the rows of a case table.

    Raises:
        UserError: the file is missing, or a row has an unknown key, a missing key or a wrong type.
    """
    return _read_json(TypeAdapter(tuple[Case, ...]), path, "case table", "row ")


def load_sample(path: Path) -> CaseSample:
    """Read one sample, written as in a case table.

    Raises:
        UserError: the file is missing, or the sample has an unknown key, a missing key or a wrong type.
    """
    return _read_json(TypeAdapter(CaseSample), path, "sample", "")


def _read_json(adapter: TypeAdapter[_ModelT], path: Path, file_kind: str, prefix: str) -> _ModelT:
    """Return the validated content; in messages, `file_kind` names the file and `prefix` precedes the place in it."""
    try:
        return adapter.validate_json(path.read_bytes(), context={"folder": path.parent})
    except OSError as error:
        raise UserError(f"cannot read the {file_kind} {path}: {error.strerror}") from error
    except ValidationError as error:
        raise UserError(f"{path}: {first_error_message(error, prefix)}") from error


def first_error_message(error: ValidationError, prefix: str = "") -> str:
    """Return the message of the first error, after `prefix` and the path of keys to the wrong value."""
    first = error.errors()[0]
    keys = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")  # pydantic's prefix for the errors of our own checks
    return f"{prefix}{keys}: {message}" if keys else message
