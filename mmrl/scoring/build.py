"""Builds the scorer and the group rewards of a config.

A reward term scores each response by itself. A group reward compares a rollout with the others of its prompt; its value
is added to the total after the terms have been combined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path

from mmrl.algo.group_rewards import BoundGroupReward
from mmrl.config import Config
from mmrl.config.schema import matches_conditions
from mmrl.scoring import BoundTerm, RewardFunctionScorer, registry
from mmrl.types import Sample, UserError
from mmrl.utils.plugins import load_plugin


def build_scorer(config: Config, base: Path) -> RewardFunctionScorer:
    """Return the scorer of `rewards.terms`. Files are relative to `base`."""
    terms = []
    for options in config.rewards.terms:
        # Worker processes load the reward again: the module of a user's file does not exist there before.
        load = partial(registry.load_bound_reward, options.fn, base, options.args)
        reward = load()
        terms.append(
            BoundTerm(name=options.name or reward.reward.name, reward=reward, load_reward=load, options=options)
        )
    return RewardFunctionScorer(terms, config.rewards)


def build_group_rewards(config: Config, base: Path) -> tuple[BoundGroupReward, ...]:
    """Return the group rewards. Files are relative to `base`.

    Raises:
        UserError: a function or option is unknown, a name is taken, or `correct` names no reward term.
    """
    term_names = [
        term.name or registry.load_bound_reward(term.fn, base, term.args).reward.name for term in config.rewards.terms
    ]
    bound = []
    for options in config.rewards.group_rewards:
        compute = load_plugin(options.fn, base, options.args, role="group reward", parameters=("group",))
        name = options.name or options.fn.rpartition(":")[2]
        bound.append(BoundGroupReward(name=name, compute=compute, options=options))
    names = [*term_names, *map(attrgetter("name"), bound)]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two reward terms are named {name!r}; give one another `name`")
    for options in config.rewards.group_rewards:
        unknown = [name for name in options.args.get("correct", ()) if name not in term_names]
        if unknown:
            raise UserError(
                f"group reward {options.fn}: correct: there is no term {unknown[0]!r}; there are "
                f"{', '.join(term_names)}"
            )
    return tuple(bound)


def reward_weights(scorer: RewardFunctionScorer, group_rewards: Sequence[BoundGroupReward]) -> dict[str, float]:
    """Return the weight of each reward term and group reward, without schedules."""
    return {**scorer.term_weights, **{term.name: term.options.weight for term in group_rewards}}


def check_group_rewards(
    group_rewards: Sequence[BoundGroupReward], scorer: RewardFunctionScorer, samples: Iterable[Sample]
) -> None:
    """Check that group rewards find the reward terms that they read.

    Raises:
        UserError: a group reward applies to a sample, and a term that it reads does not.
    """
    for group_reward in group_rewards:
        for sample in samples:
            if not matches_conditions(group_reward.options.when, sample):
                continue
            applicable = list(map(attrgetter("name"), scorer.applicable_terms(sample)))
            missing = [name for name in group_reward.options.args.get("correct", ()) if name not in applicable]
            if missing:
                raise UserError(
                    f"group reward {group_reward.name!r} reads the term {missing[0]!r}, which does not apply to sample "
                    f"{sample.id!r} of task {sample.task!r}: give both the same `when`"
                )
