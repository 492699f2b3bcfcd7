"""Classic multi-turn environments of verifiers: `fn: "mmrl.rollout.environments.verifiers:make"`.

Questions are the rows of the environment's dataset. The environment gets a sample's columns `prompt` (messages),
`answer`, `info`, `example_id` and `task`; without a column `prompt` it gets the sample's text. When the environment
ends the episode, its rubric scores it, and the score is the reward of the last turn.

Source: verifiers 0.1.9 to 0.1.14, `MultiTurnEnv.rollout` and `Rubric.score_rollout`,
https://github.com/PrimeIntellect-ai/verifiers.
Departures: the policy of this run writes the assistant's messages; a rubric that scores groups is refused; an episode
that a limit of the step ends is not scored. Programs of verifiers 1 own their loop and cannot be adapted.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from mmrl.rollout.environments.conversions import finite_numbers, observe_blocks
from mmrl.types import Environment, Observation, Sample, StepResult, UserError

Message = Mapping[str, Any]

_COLUMNS = ("prompt", "answer", "info", "example_id", "task")


class VerifiersEpisode:
    """Drives a MultiTurnEnv with the turns that the policy wrote."""

    def __init__(self, env: Any) -> None:  # noqa: ANN401
        """Wrap an environment; its coroutines run in a loop of this episode."""
        self.env, self.loop = env, asyncio.new_event_loop()

    def reset(self, sample: Sample, seed: int) -> Observation:
        """Begin with the sample's row, which is the question."""
        text = "".join(part for part in sample.parts if isinstance(part, str))
        row: dict[str, Any] = {"prompt": [{"role": "user", "content": text}], "answer": "", "info": {}}
        row |= {name: sample.meta[name] for name in _COLUMNS if name in sample.meta}
        client, self.write_message = _load_message_types()
        self.state = self._run(self.env.init_state(row, client=client, model=""))
        self.state = self._run(self.env.setup_state(self.state)) or self.state
        self.shown = list(self.state["prompt"])
        return Observation()

    def step(self, action: str) -> StepResult:
        """Add the action as an assistant message, and return the environment's reply."""
        turn: dict[str, Any] = {"tokens": None, "reward": None, "advantage": None, "is_truncated": False, "extras": {}}
        turn |= {"response": None, "prompt": self.shown, "trajectory_id": self.state["trajectory_id"]}
        turn["completion"] = [self.write_message(role="assistant", content=action)]
        self._run(self.env.add_trajectory_step(self.state, turn))
        if self._run(self.env.is_completed(self.state)):
            return self._finish(())
        messages = list(self._run(self.env.get_prompt_messages(self.state)))
        answered, self.shown = messages[len(self.shown) + 1 :], messages
        if self._run(self.env.is_completed(self.state)):
            return self._finish(answered)
        return StepResult(observation=_observe(answered))

    def close(self) -> None:
        """Close the loop."""
        self.loop.close()

    def _finish(self, answered: Sequence[Message]) -> StepResult:
        # Up to 0.1.12, `is_completed` cleans up. Later versions do so in `_finalize_rollout`, with the completion.
        self._run(getattr(self.env, "_finalize_rollout", self.env.render_completion)(self.state))
        score = self.env.rubric.score_rollout
        limits = {"score_sem": nullcontext()} if "score_sem" in inspect.signature(score).parameters else {}
        self._run(score(self.state, **limits))
        cut = self.state.get("stop_condition") == "max_turns_reached"
        return StepResult(
            observation=_observe(answered),
            reward=float(self.state["reward"]),
            terminated=not cut,
            truncated=cut,
            info=finite_numbers(self.state["metrics"] or {}),
        )

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401
        return self.loop.run_until_complete(coroutine)


def make(*, env: str, args: dict[str, Any] | None = None) -> Environment:
    """Load `env`, as `verifiers.load_environment` names it, with `args`; raises UserError if it cannot."""
    try:
        import verifiers
    except ImportError as error:
        raise UserError("verifiers is missing; pip install 'verifiers<0.2'") from error
    try:
        loaded = verifiers.load_environment(env, **(args or {}))
    except (AttributeError, ImportError, ValueError, RuntimeError) as error:
        raise UserError(f"env={env!r}: verifiers cannot load it: {error}") from error
    if not hasattr(loaded, "env_response"):
        raise UserError(f"env={env!r} is a {type(loaded).__name__}, not a MultiTurnEnv, so it answers no turns")
    return VerifiersEpisode(loaded)


def _load_message_types() -> tuple[Any, Callable[..., Message]]:
    """Return a client, which is never called, and the type of assistant messages in this version of verifiers."""
    try:
        from verifiers.clients import OpenAIChatCompletionsClient
        from verifiers.types import AssistantMessage
    except ImportError:  # up to 0.1.10, messages are dictionaries and the client may be None
        return None, dict
    return OpenAIChatCompletionsClient(None), AssistantMessage


def _observe(messages: Sequence[Message]) -> Observation:
    blocks: list[Message] = []
    for message in messages:
        content: Any = message["content"]
        blocks += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return observe_blocks(blocks, "\n")
