"""Loads the tools, rollout steps and engine that a config names.

At module level it imports neither torch nor vLLM: tool processes import it, and few runs have their own step or engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.config.schema import CustomEngineConfig, CustomStepConfig, EnvironmentConfig, RolloutStepConfigs, ToolsConfig
from mmrl.config.schema.rollout_steps import step_name
from mmrl.rollout.tools.workers import load_tool
from mmrl.utils.plugins import load_plugin

if TYPE_CHECKING:
    from mmrl.rollout.engines.base import EngineContext, RolloutEngine
    from mmrl.rollout.steps.base import StepFactory


def load_rollout_steps(steps: RolloutStepConfigs, base: Path) -> dict[str, StepFactory]:
    """Return the functions that make the user's rollout steps, by step name; check that tools and environments load.

    Tools and environments are loaded again by the processes that run them. Raises as `load_plugin`.
    """
    factories: dict[str, StepFactory] = {}
    for step in steps:
        match step:
            case ToolsConfig():
                for tool in step.tools:
                    load_tool(base, tool)
            case EnvironmentConfig():
                load_plugin(step.fn, base, step.args, role="environment", parameters=())
            case CustomStepConfig():
                factories[step_name(step)] = load_plugin(
                    step.fn, base, step.args, role="rollout step", parameters=("context",)
                )
    return factories


def load_engine(choice: CustomEngineConfig | str, base: Path) -> Callable[[EngineContext], RolloutEngine] | None:
    """Return the function that makes a user's engine, `rollout: {engine: {fn: ./mine.py:make_engine}}`, else None.

    Raises as `load_plugin`. `SharedEngine` checks what the function makes.
    """
    if isinstance(choice, str):
        return None
    return load_plugin(choice.fn, base, choice.args, role="rollout engine", parameters=("context",))
