"""Advantages of single turns in an environment, from the rewards of the turns: which action earned what.

Turn t of rollout i has the reward r(i, t), and its return is R(i, t) = Σ_{u >= t} γ^(u - t) r(i, u), with γ the
discount. Only rollouts of one group are compared. z(x) = (x - mean) / (std + eps), over the values that are compared,
with the sample deviation (divisor n - 1), or without the division for `scale: none`. z is 0 if there is only one value,
or if all are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain

from mmrl.algo.advantages import normalize_rewards
from mmrl.config.schema import AdvantageConfig
from mmrl.types import Group


def compute_turn_advantages(
    group: Group, advantages: Sequence[float], options: AdvantageConfig
) -> list[tuple[float, ...]] | None:
    """Return the advantages of each turn by `credit: to_go` or `gigpo`, a row for each rollout; None without turns.

    `advantages` has one number for each rollout, which `credit: broadcast` (GRPO) would give to all turns.
    """
    if not any(score.by_turn for score in group.scores):
        return None
    returns = [discounted_returns(score.by_turn, options.discount) for score in group.scores]
    if options.credit == "to_go":
        keys = [range(len(row)) if options.compare == "turn" else [0] * len(row) for row in returns]
        return compare_turns(returns, keys, options)
    # Siblings at equal states chose between the same actions.
    states: list[list[Hashable]] = [[turn.state for turn in rollout.turns] for rollout in group.rollouts]
    rows = []
    for advantage, turn_values in zip(advantages, compare_turns(returns, states, options), strict=True):
        rows.append(tuple(advantage + options.step_weight * value for value in turn_values))
    return rows


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Return R(t) = Σ_{u >= t} discount^(u - t) rewards(u) for each turn t of an episode."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]


def compare_turns(
    values: Sequence[Sequence[float]], keys: Sequence[Sequence[Hashable]], options: AdvantageConfig
) -> list[tuple[float, ...]]:
    """Return z of each value, over all values of the group that have the same key; rows are rollouts, columns turns.

    What the caller takes as the key of a turn decides the method:
        the turn's index: returns-to-go with a baseline for each turn;
        the same for all: `step_reinforce` of ROLL (https://github.com/alibaba/ROLL);
        the state before the turn: the step part of GiGPO (arXiv:2505.10978, eqs. 6 and 7).

    Departures from GiGPO's code: a state that was met once has z = 0, where the code keeps the raw score; penalties
    for invalid actions are ordinary rewards, so they are discounted.
    """
    compared: dict[Hashable, list[float]] = {}
    for value, key in zip(chain.from_iterable(values), chain.from_iterable(keys), strict=True):
        compared.setdefault(key, []).append(value)
    normalized = dict(zip(compared, normalize_rewards(list(compared.values()), options), strict=True))
    # The values of a key are taken in the order in which they were collected.
    remaining = {key: iter(row) for key, row in normalized.items()}
    return [tuple(next(remaining[key]) for key in row) for row in keys]
