"""Case tables: for each reward, responses with the score they must earn and why. Tests and documentation at once.

A table is a JSON list of rows. `sample` holds the target (`kind`, `value`, and for a box its `frame`) and the image's
size before and after resizing; `response` is the model's text, repeated `repeat` times, its coordinates in `frame`.
`expected` is a value or "unscorable". `source` says where the row comes from: a paper, a rule, an arithmetic.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from mmrl.answer import Grammar
from mmrl.types import (
    Finish,
    Frame,
    ImageRef,
    Kind,
    ResizeMap,
    Response,
    Sample,
    Size,
    Target,
    Term,
    Unscorable,
    UserError,
)
from mmrl_rewards.contract import BoundReward


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CaseSample(_Row):
    """The sample of a case. `image` and `resized` are (width, height) in pixels; no image when `image` is None."""

    kind: Kind
    value: Any
    frame: Frame | None = None
    image: tuple[int, int] | None = None
    resized: tuple[int, int] | None = None


class Case(_Row):
    """One row of a table."""

    fn: str
    args: dict[str, Any] = {}
    sample: CaseSample
    response: str
    repeat: int = 1
    frame: Frame = Frame.PX_ORIGINAL
    think: Literal["none", "optional", "required"] = "optional"
    expected: float | Literal["unscorable"]
    tol: float = 1e-6
    source: str

    def build(self) -> tuple[Response, Sample]:
        """What the reward is given."""
        text = self.response * self.repeat
        sample = self.sample
        sizes = [sample.image] if sample.image else []
        resizes = tuple(ResizeMap(Size(*size), Size(*(sample.resized or size))) for size in sizes)
        response = Response(
            text=text,
            answer=Grammar(think=self.think).parse(text, sample.kind),
            finish=Finish.EOS,
            num_tokens=len(text.split()),
            resizes=resizes,
            frame=self.frame,
        )
        pictures = tuple(ImageRef(path="case.png", sha256="") for _ in sizes)
        target = Target(kind=sample.kind, value=sample.value, frame=sample.frame)
        return response, Sample(id="case", task="case", parts=(*pictures, "question"), target=target)

    def failure(self, reward: BoundReward) -> str:
        """Score the case; empty if the score is as expected, else what came instead."""
        response, sample = self.build()
        try:
            result = reward(response, sample)
        except Unscorable as error:
            return "" if self.expected == "unscorable" else f"expected {self.expected}, but it is unscorable: {error}"
        value, reason = result if isinstance(result, Term) else (result, "no reason given")
        if self.expected == "unscorable" or abs(value - self.expected) > self.tol:
            return f"expected {self.expected}, got {value} ({reason}); source: {self.source}"
        return ""


def load(path: Path) -> tuple[Case, ...]:
    """Read a table.

    Raises:
        UserError: the file is missing, or a row has an unknown or missing key or a wrong type.
    """
    try:
        return TypeAdapter(tuple[Case, ...]).validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read the case table {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: row {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
