"""From a config to what scores rollouts: rewards, and what siblings earn beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from mmrl.algo.group_rewards import BoundGroupReward
from mmrl.config import Config
from mmrl.config.schema import GroupRewardConfig, RewardTermConfig
from mmrl.scoring import BoundTerm, RewardFunctionScorer, registry
from mmrl.types import Sample, UserError
from mmrl.utils.plugins import load_plugin


def build_scorer(config: Config, base: Path) -> RewardFunctionScorer:
    """The rewards; functions in files are relative to `base`."""
    return RewardFunctionScorer([_bind_term(term, base) for term in config.rewards.terms], config.rewards)


def build_group_rewards(config: Config, base: Path) -> tuple[BoundGroupReward, ...]:
    """What rollouts earn beside their siblings; functions in files are relative to `base`.

    Raises:
        UserError: a function or option is unknown, a name is taken, or `correct` names no reward term.
    """
    taken = [
        term.name or registry.load_bound_reward(term.fn, base, term.args).reward.name for term in config.rewards.terms
    ]
    bound = [_bind_group_reward(term, base) for term in config.rewards.group_rewards]
    for name in (names := [*taken, *(term.name for term in bound)]):
        if names.count(name) > 1:
            raise UserError(f"two reward terms are named {name!r}; give one another `name`")
    for options in config.rewards.group_rewards:
        if unknown := [name for name in options.args.get("correct", ()) if name not in taken]:
            raise UserError(
                f"group term {options.fn}: correct: there is no term {unknown[0]!r}, but {', '.join(taken)}"
            )
    return tuple(bound)


def reward_weights(scorer: RewardFunctionScorer, group_rewards: Sequence[BoundGroupReward]) -> dict[str, float]:
    """The weight of every reward and group term, without schedules."""
    return {**scorer.term_weights, **{term.name: term.options.weight for term in group_rewards}}


def check_group_rewards(
    group_rewards: Sequence[BoundGroupReward], scorer: RewardFunctionScorer, samples: Iterable[Sample]
) -> None:
    """Raises UserError when a group term concerns a sample, and a reward term that it reads does not."""
    for term in group_rewards:
        for sample in filter(term.options.applies_to, samples):
            known = scorer.applicable_term_names(sample)
            if missing := [name for name in term.options.args.get("correct", ()) if name not in known]:
                raise UserError(
                    f"group term {term.name!r} reads the term {missing[0]!r}, which does not apply to sample "
                    f"{sample.id!r} of task {sample.task!r}: give both the same `when`"
                )


def _bind_term(term: RewardTermConfig, base: Path) -> BoundTerm:
    load = partial(registry.load_bound_reward, term.fn, base, term.args)
    reward = load()
    return BoundTerm(name=term.name or reward.reward.name, reward=reward, load_reward=load, options=term)


def _bind_group_reward(term: GroupRewardConfig, base: Path) -> BoundGroupReward:
    compute = load_plugin(term.fn, base, term.args, role="group reward", parameters=("group",))
    name = term.name or term.fn.rpartition(":")[2]
    return BoundGroupReward(name=name, compute=compute, options=term)
