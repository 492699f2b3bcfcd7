"""Environments of gymnasium, shown as pictures: `fn: "mmrl.rollout.environments.gymnasium:make"`.

Source: gymnasium 1.4, https://gymnasium.farama.org/api/env. Needs the extra `gymnasium`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmrl.rollout.environments.conversions import encode_picture, finite_numbers
from mmrl.types import Action, Environment, Observation, Sample, StepResult, UserError


class GymnasiumEnvironment:
    """Shows `render()` of an environment after each step; an action is a word of `actions`, or a number."""

    def __init__(self, env: Any, actions: Mapping[str, int], question: str) -> None:  # noqa: ANN401
        """Wrap an environment that was made with `render_mode="rgb_array"`."""
        self.env, self.actions, self.question = env, actions, question

    def reset(self, sample: Sample, seed: int) -> Observation:
        """Begin the episode of a seed, and show it with the question."""
        # gymnasium takes seeds of 32 bits.
        self.env.reset(seed=seed % 2**32)
        return Observation(text=self.question, media=(encode_picture(self.env.render()),))

    def step(self, action: str | Action) -> StepResult:
        """Take the action that the text names. Other text changes nothing, and the step is not valid."""
        word = action.name.lower() if isinstance(action, Action) else action.strip().lower()
        number = int(word) if not self.actions and word.isdecimal() else self.actions.get(word)
        if number is None or not self.env.action_space.contains(number):
            known = ", ".join(self.actions) or "a number"
            return StepResult(observation=Observation(text=f"There is no such action; there is {known}."), valid=False)
        _, reward, terminated, truncated, info = self.env.step(number)
        return StepResult(
            observation=Observation(media=(encode_picture(self.env.render()),)),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            info=finite_numbers(info),
        )

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def make(
    *, id: str, question: str, actions: dict[str, int] | None = None, kwargs: dict[str, Any] | None = None
) -> Environment:
    """Make the environment `id`, such as "minigrid:MiniGrid-Empty-5x5-v0"; raises UserError if there is none.

    Options:
        question: text of the first observation, beside its picture.
        actions: numbers of a discrete action space, by the word that the model writes; without them it writes numbers.
        kwargs: options of the environment, such as {tile_size: 8}.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise UserError("gymnasium is missing; pip install 'mmrl[gymnasium]'") from error
    try:
        env = gymnasium.make(id, render_mode="rgb_array", **(kwargs or {}))
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise UserError(f"id={id!r}: gymnasium cannot make it: {error}") from error
    words = {word.lower(): number for word, number in (actions or {}).items()}
    return GymnasiumEnvironment(env, words, question)
