"""Loads the tools, rollout steps and engine that a config names.

At module level it imports neither torch nor vLLM: tool processes import it, and few runs have their own step or engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.config.schema import (
    CustomEngineConfig,
    CustomStepConfig,
    EnvironmentConfig,
    RolloutStepConfigs,
    ToolConfig,
    ToolsConfig,
)
from mmrl.config.schema.rollout_steps import step_name
from mmrl.rollout.tools.workers import ToolFunction
from mmrl.types import UserError
from mmrl.utils.plugin_args import check_methods
from mmrl.utils.plugins import load_plugin

if TYPE_CHECKING:
    from mmrl.rollout.engines.base import EngineContext, RolloutEngine
    from mmrl.rollout.steps.base import RolloutContext, RolloutStep, StepFactory


def load_tool(base: Path, options: ToolConfig) -> ToolFunction:
    """Return the tool that the config names, with its options bound. Files are relative to `base`.

    Raises:
        UserError: there is no such tool, or an option is unknown, missing or of the wrong type.
    """
    return load_plugin(options.fn, base, options.args, role="tool", parameters=("call", "sample"))


def load_steps(steps: RolloutStepConfigs, base: Path) -> dict[str, StepFactory]:
    """Return the functions that make the user's rollout steps, by step name; check that tools and environments load.

    Tools and environments are loaded again by the processes that run them.

    Raises:
        UserError: a function cannot be loaded, or does not take its options.
    """
    factories: dict[str, StepFactory] = {}
    for step in steps:
        match step:
            case ToolsConfig():
                for tool in step.tools:
                    load_tool(base, tool)
            case EnvironmentConfig():
                from mmrl.rollout.environments.episodes import load_environment

                load_environment(base, step)
            case CustomStepConfig():
                factories[step_name(step)] = _load_step(step, base)
    return factories


def _load_step(options: CustomStepConfig, base: Path) -> StepFactory:
    """Return the function that makes a user's step, `{fn: ./mine.py:make_step}`; what it makes is checked."""
    from mmrl.rollout.steps.base import RolloutStep

    make_step = load_plugin(options.fn, base, options.args, role="rollout step", parameters=("context",))

    def make_checked_step(context: RolloutContext) -> RolloutStep:
        rollout_step: RolloutStep = make_step(context)
        check_methods(rollout_step, RolloutStep, ("__call__",), owner=f"rollout step {options.fn!r}")
        return rollout_step

    return make_checked_step


def load_engine(options: CustomEngineConfig, base: Path) -> Callable[[EngineContext], RolloutEngine]:
    """Return the function that makes a user's engine, `rollout: {engine: {fn: ./mine.py:make_engine}}`.

    What it makes is checked to be a `RolloutEngine`.

    Raises:
        UserError: there is no such function, or an option is unknown, missing or of the wrong type.
    """
    from mmrl.rollout.engines.base import RolloutEngine

    make_engine = load_plugin(options.fn, base, options.args, role="rollout engine", parameters=("context",))

    def make_checked_engine(context: EngineContext) -> RolloutEngine:
        engine: RolloutEngine = make_engine(context)
        owner = f"rollout.engine {options.fn!r}"
        methods = ("generate", "load_weights", "logits_dtypes", "sleep", "close")
        check_methods(engine, RolloutEngine, methods, owner=owner)
        for name in ("max_model_len", "shares_weights", "returns_routes"):
            if name not in dir(engine):
                raise UserError(
                    f"{owner} returned {engine!r:.80}, which has no attribute {name!r}; set it, or inherit the default "
                    f"from {RolloutEngine.__module__}.{RolloutEngine.__name__}"
                )
        return engine

    return make_checked_engine
