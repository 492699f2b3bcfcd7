"""How held-out reward, and what a benchmark asks, is measured."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from mmrl.config.schema.base import Positive, Strict
from mmrl.config.schema.program import ONCE, ContinueWith, Generate, Probe, Steps, check_order


class Evaluation(Strict):
    """How held-out reward is measured."""

    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    """0 is greedy."""
    max_new_tokens: Positive = 512
    """Longest response."""
    batch_size: Positive = 64
    """Prompts per generation batch."""
    program: Annotated[Steps, AfterValidator(check_order)] = ONCE
    """What is done with a prompt, as in training; no step may look at whether a response is right."""

    @field_validator("program")
    @classmethod
    def _blind(cls, program: Steps) -> Steps:
        for step in program:
            if isinstance(step, Generate) and step.chunk is not None:
                raise ValueError("evaluation completes every response: leave out `chunk`")
            if isinstance(step, Probe):
                raise ValueError("a probe measures a step of training; evaluation has none")
            if isinstance(step, ContinueWith) and (key := step.looks_at_verdicts):
                raise ValueError(f"step {step.name!r} has `{key}`, by which evaluation would know the right answer")
            if isinstance(step, ContinueWith) and step.place == "add":
                raise ValueError(f"step {step.name!r} has `place: add`, but evaluation is of one response")
        return program
