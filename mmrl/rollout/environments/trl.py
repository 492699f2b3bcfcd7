"""Environments as TRL's `environment_factory` takes them: `fn: "mmrl.rollout.environments.trl:make"`, `action: call`.

Such a class has `reset(**row)`, whose text is part of the question, and public methods that the model may call. It may
have `get_reward()`, which is called once, when a turn without a call ends the episode.

Source: TRL 1.16, `GRPOTrainer(environment_factory=...)`, https://huggingface.co/docs/trl/openenv.
Departures: one call per turn; an action whose method raises is not valid, and the model sees its error as in TRL; an
episode that a limit of the step ends has no call of `get_reward`.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from mmrl.rollout.environments.conversions import observe_blocks
from mmrl.types import Action, Environment, Observation, Sample, StepResult, UserError
from mmrl.utils.plugins import load_function

_NOT_FOR_MODELS = ("reset", "get_reward", "close")


class TrlEnvironment:
    """Calls the methods of an object that was written for TRL."""

    def __init__(self, instance: Any) -> None:  # noqa: ANN401
        """Wrap an instance of the class."""
        self.instance = instance
        self.methods = dict(inspect.getmembers(instance, inspect.ismethod))

    def reset(self, sample: Sample, seed: int) -> Observation:
        """Reset the object with the seed and the columns of the sample's row, omitting what `reset` does not take."""
        row = {**sample.meta, "seed": seed}
        parameters = inspect.signature(self.instance.reset).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            row = {name: value for name, value in row.items() if name in parameters}
        return _observe(self.instance.reset(**row))

    def step(self, action: str | Action) -> StepResult:
        """Call the method that the action names; a turn without a call ends the episode."""
        if not isinstance(action, Action):
            get_reward = getattr(self.instance, "get_reward", float)
            return StepResult(reward=float(get_reward()), terminated=True)
        try:
            if action.name not in self.methods or action.name.startswith("_") or action.name in _NOT_FOR_MODELS:
                raise ValueError(f"Tool {action.name} not found.")
            return StepResult(observation=_observe(self.methods[action.name](**action.arguments)))
        except Exception as error:  # noqa: BLE001  # as in TRL, the model sees any error of a method
            return StepResult(observation=Observation(text=json.dumps({"error": str(error)})), valid=False)

    def close(self) -> None:
        """Close the object, if it can be."""
        if hasattr(self.instance, "close"):
            self.instance.close()


def make(*, fn: str, args: dict[str, Any] | None = None) -> Environment:
    """Call `fn`, `package.module:Class` or an absolute path, with `args`; raises UserError if that has no `reset`."""
    instance = load_function(fn, Path.cwd(), role="environment")(**(args or {}))
    if not callable(getattr(instance, "reset", None)):
        raise UserError(f"fn={fn!r}: an environment for TRL has a method `reset`")
    return TrlEnvironment(instance)


def _observe(result: object) -> Observation:
    """Return what a method returned: text, None, or a list of content blocks."""
    if isinstance(result, list):
        return observe_blocks(result)
    return Observation(text="" if result is None else str(result))
