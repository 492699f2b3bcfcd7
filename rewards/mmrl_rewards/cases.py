"""Case tables: for each reward, responses with the score they must earn and why. Tests and documentation at once.

A table is a JSON list of rows. `sample` holds the target (`kind`, `value`, for coordinates `coordinates` and `medium`) and
the sizes of its media before and after resizing; `response` is the model's text, repeated `repeat` times, its
coordinates in `coordinates`, read by `response_format`. `expected` is a value or "unscorable". `source` says where the row comes
from: a paper, a rule, an arithmetic. `fn` may name a file beside the table: `./my_rewards.py:my_fn`.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from mmrl.answer import ResponseFormat
from mmrl.types import (
    AnswerType,
    CoordinateSystem,
    FinishReason,
    ImageRef,
    MediaRef,
    ResizeMap,
    Response,
    RewardValue,
    Sample,
    Size,
    Target,
    Unscorable,
    UserError,
    VideoRef,
)
from mmrl_rewards.contract import BoundReward

_ModelT = TypeVar("_ModelT")
_RESPONSE_FORMAT_ADAPTER: TypeAdapter[ResponseFormat] = TypeAdapter(ResponseFormat)


class _CaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CaseMedium(_CaseModel):
    """A picture or video: (width, height) in pixels, before and after resizing; a video lasts `duration` seconds."""

    type: Literal["image", "video"] = "image"
    size: tuple[int, int]
    resized: tuple[int, int] | None = None
    duration: float | None = None

    def make_ref(self) -> MediaRef:
        """A reference to no file: rewards open nothing."""
        if self.type == "image":
            return ImageRef(path="case.png", sha256="")
        return VideoRef(path="case.mp4", sha256="", start=0.0 if self.duration else None, end=self.duration)

    def make_resize_map(self) -> ResizeMap:
        """How it was resized."""
        return ResizeMap(Size(*self.size), Size(*(self.resized or self.size)))


class CaseSample(_CaseModel):
    """The sample of a case. `image` and `resized` are short for `media` of one picture; none when neither is set."""

    kind: AnswerType
    value: Any
    coordinates: CoordinateSystem | None = None
    medium: int = 0
    image: tuple[int, int] | None = None
    resized: tuple[int, int] | None = None
    media: tuple[CaseMedium, ...] = ()
    question: str = "question"
    label: Any = None
    thought: str | None = None
    meta: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check_media_given_once(self) -> CaseSample:
        if self.image and self.media:
            raise ValueError("give `media` or `image`, not both")
        return self

    def all_media(self) -> tuple[CaseMedium, ...]:
        """The media, however they are written."""
        return (CaseMedium(size=self.image, resized=self.resized),) if self.image else self.media

    def build(self) -> Sample:
        """The sample that rewards are given; `label` is of the target's kind and frame."""
        target = Target(
            answer_type=self.kind, value=self.value, coordinate_system=self.coordinates, media_index=self.medium
        )
        label = Target(
            answer_type=self.kind, value=self.label, coordinate_system=self.coordinates, media_index=self.medium
        )
        return Sample(
            id="case",
            task="case",
            parts=(*(medium.make_ref() for medium in self.all_media()), self.question),
            target=target,
            label=None if self.label is None else label,
            thinking=self.thought,
            meta=self.meta,
        )


class CaseResult(NamedTuple):
    """What a case earned: a value or "unscorable", or None when the reward failed; `ok` when that was expected."""

    value: float | Literal["unscorable"] | None
    reason: str
    passed: bool


class Case(_CaseModel):
    """One row of a table."""

    fn: str
    args: dict[str, Any] = {}
    sample: CaseSample
    response: str
    repeat: int = Field(default=1, ge=0)
    coordinates: CoordinateSystem = CoordinateSystem.PX_ORIGINAL
    thinking: Literal["none", "optional", "required"] = "optional"
    response_format: dict[str, Any] = {}
    finish: FinishReason = FinishReason.EOS
    tokens: int | None = None
    expected: float | Literal["unscorable"]
    tol: float = 1e-6
    source: str

    @field_validator("response_format")
    @classmethod
    def _check_response_format(cls, response_format: dict[str, Any]) -> dict[str, Any]:
        if unknown := sorted(response_format.keys() - {field.name for field in fields(ResponseFormat)}):
            raise ValueError(f"a response format has no {unknown[0]!r}")
        _RESPONSE_FORMAT_ADAPTER.validate_python(response_format)
        return response_format

    def build(self) -> tuple[Response, Sample]:
        """What the reward is given."""
        text = self.response * self.repeat
        response_format = _RESPONSE_FORMAT_ADAPTER.validate_python({"thinking": self.thinking, **self.response_format})
        response = Response(
            text=text,
            answer=response_format.parse(text, self.sample.kind),
            finish_reason=self.finish,
            num_tokens=len(text.split()) if self.tokens is None else self.tokens,
            resize_maps=tuple(medium.make_resize_map() for medium in self.sample.all_media()),
            coordinate_system=self.coordinates,
        )
        return response, self.sample.build()

    def score(self, reward: BoundReward) -> CaseResult:
        """Score the case. A reward that raises anything but `Unscorable` fails it, and the table goes on."""
        response, sample = self.build()
        with ErrorCatcher() as caught:
            result = reward(response, sample)
        match caught.error:
            case None:
                value, reason = result if isinstance(result, RewardValue) else (result, "no reason given")
            case Unscorable() as error:
                return CaseResult("unscorable", str(error), self.expected == "unscorable")
            case error:
                return CaseResult(None, f"raised {type(error).__name__}: {error}", False)
        if not isinstance(value, int | float):
            return CaseResult(None, f"returned {value!r:.80}, which is no number", False)
        if not reward.reward.low <= value <= reward.reward.high:
            return CaseResult(value, f"outside its range; {reason}", False)
        return CaseResult(value, reason, self.expected != "unscorable" and abs(value - self.expected) <= self.tol)

    def failure_message(self, reward: BoundReward) -> str:
        """Score the case; empty if the score is as expected, else what came instead."""
        got, reason, ok = self.score(reward)
        if ok:
            return ""
        if got == "unscorable":
            return f"expected {self.expected}, but it is unscorable: {reason}; source: {self.source}"
        return f"expected {self.expected}, got {got} ({reason}); source: {self.source}"


class ErrorCatcher:
    """Keeps the error that ends its block, of whatever kind, for a report on code that is not trusted."""

    error: Exception | SystemExit | None = None

    def __enter__(self) -> ErrorCatcher:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Keep the error; an interruption goes on."""
        self.error = error if isinstance(error, Exception | SystemExit) else None
        return self.error is not None


def load_case_table(path: Path) -> tuple[Case, ...]:
    """Read a table.

    Raises:
        UserError: the file is missing, or a row has an unknown or missing key or a wrong type.
    """
    return _read_json(TypeAdapter(tuple[Case, ...]), path, "case table", "row ")


def load_sample(path: Path) -> CaseSample:
    """Read one sample, written as in a table.

    Raises:
        UserError: the file is missing, or it has an unknown or missing key or a wrong type.
    """
    return _read_json(TypeAdapter(CaseSample), path, "sample", "")


def _read_json(adapter: TypeAdapter[_ModelT], path: Path, what: str, prefix: str) -> _ModelT:
    try:
        return adapter.validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read the {what} {path}: {error.strerror}") from error
    except ValidationError as error:
        raise UserError(f"{path}: {first_error_message(error, prefix)}") from error


def first_error_message(error: ValidationError, prefix: str = "") -> str:
    """What is wrong, behind the keys that lead there; `where` stands before them."""
    first = error.errors()[0]
    at = ".".join(map(str, first["loc"]))
    return f"{prefix}{at}: {first['msg']}" if at else first["msg"]
