"""Builds the scorer of a config."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mmrl.config import Config
from mmrl.scoring import BoundTerm, RewardFunctionScorer, registry
from mmrl.scoring.term_checks import check_terms
from mmrl.types import MediaOpener, UserError


def load_reward_terms(config: Config, base: Path) -> tuple[BoundTerm, ...]:
    """Load the functions of `rewards.terms`, with their options bound. Files are relative to `base`.

    Raises:
        UserError: there is no such reward, an option is unknown, missing or of the wrong type, or the terms do not fit
            together.
    """
    terms = []
    for index, options in enumerate(config.rewards.terms):
        # Worker processes load the reward again, because they have not imported a user's file.
        load = partial(registry.load_bound_reward, options.fn, base, options.args, options.fallback_on)
        bound = load()
        try:
            term = BoundTerm(name=options.name or bound.reward.name, reward=bound, load_reward=load, options=options)
        except UserError as error:
            error.key = f"rewards.terms.{index}.{error.key}"
            raise
        terms.append(term)
    check_terms(terms, config.rewards.combine)
    return tuple(terms)


def build_scorer(config: Config, base: Path, media_opener: MediaOpener | None = None) -> RewardFunctionScorer:
    """Return the scorer of `rewards.terms`, which see media through `media_opener`; raises as `load_reward_terms`."""
    return RewardFunctionScorer(load_reward_terms(config, base), config.rewards, media_opener)
