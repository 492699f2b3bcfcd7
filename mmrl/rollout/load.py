"""Loads the tools and rollout steps that a config names. Imports neither torch nor vLLM: tool processes import it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.config.schema import CustomStepConfig, EnvironmentConfig, RolloutStepConfigs, ToolConfig, ToolsConfig
from mmrl.config.schema.rollout_steps import step_name
from mmrl.rollout.tools.workers import ToolFunction
from mmrl.utils.plugins import load_plugin

if TYPE_CHECKING:
    from mmrl.rollout.steps.base import StepFactory


def load_tool(base: Path, options: ToolConfig) -> ToolFunction:
    """Return the tool that the config names, with its options bound. Files are relative to `base`.

    Raises:
        UserError: there is no such tool, or an option is unknown, missing or of the wrong type.
    """
    return load_plugin(options.fn, base, options.args, role="tool", parameters=("call", "sample"))


def load_steps(steps: RolloutStepConfigs, base: Path) -> dict[str, StepFactory]:
    """Return the functions that make the user's rollout steps, by the name of the step; check that the others load.

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
                # It imports torch, as the user's steps do, and few runs have one.
                from mmrl.rollout.steps.custom import load_step_factory

                factories[step_name(step)] = load_step_factory(step, base)
    return factories
