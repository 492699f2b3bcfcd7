"""Engines and rollout steps of the user's own, named by a function."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mmrl.config.schema.base import Identifier, NonNegativeInt, StrictModel


class CustomEngineConfig(StrictModel):
    """An engine of the user's own (docs/extending/rollout_engine.md)."""

    fn: str
    """`module:function` or `./file.py:function`; called with an `EngineContext`, it returns a `Sampler`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of the function."""


class CustomStepConfig(StrictModel):
    """A rollout step of the user's own (docs/extending/rollout_step.md)."""

    kind: Literal["custom"] = "custom"
    """Selects this kind of step; may be left out beside `fn`."""
    fn: str
    """`module:function` or `./file.py:function`; called with a `RolloutContext`, it returns a `RolloutStep`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of the function."""
    name: Identifier | None = None
    """Name in messages; the function's own when left out."""
    max_added_tokens: NonNegativeInt = 0
    """Tokens that the step may add to a response; vLLM reserves room for them behind the longest prompt."""

    def describe(self) -> list[str]:
        """Return the step as a line."""
        name = self.name or self.fn.rpartition(":")[2]
        return [f"{name}: {self.fn} changes the rollouts; it may add {self.max_added_tokens} tokens to a response"]


def find_step_kind(value: object) -> object:
    """Return the tag by which pydantic chooses the model of a rollout step: its `kind`, or `custom` beside `fn`."""
    if isinstance(value, dict):
        return value.get("kind", "custom" if "fn" in value else None)
    return getattr(value, "kind", None)


def find_engine_form(value: object) -> str:
    """Return the tag by which pydantic reads `rollout.engine`: the `name` of an engine, or a `function`."""
    return "function" if isinstance(value, dict | CustomEngineConfig) else "name"
