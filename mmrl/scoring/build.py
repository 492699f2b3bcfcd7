"""Builds the scorer of a config."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mmrl.config import Config
from mmrl.scoring import BoundTerm, RewardFunctionScorer, registry
from mmrl.types import MediaOpener


def load_reward_terms(config: Config, base: Path) -> tuple[BoundTerm, ...]:
    """Load the functions of `rewards.terms`, with their options bound. Files are relative to `base`.

    Raises:
        UserError: there is no such reward, or an option is unknown, missing or of the wrong type.
    """
    terms = []
    for options in config.rewards.terms:
        # Worker processes load the reward again: the module of a user's file does not exist there before.
        load = partial(registry.load_bound_reward, options.fn, base, options.args)
        reward = load()
        terms.append(
            BoundTerm(name=options.name or reward.reward.name, reward=reward, load_reward=load, options=options)
        )
    return tuple(terms)


def build_scorer(config: Config, base: Path, media_opener: MediaOpener | None = None) -> RewardFunctionScorer:
    """Return the scorer of `rewards.terms`, which see media through `media_opener`; raises as `load_reward_terms`."""
    return RewardFunctionScorer(load_reward_terms(config, base), config.rewards, media_opener)
