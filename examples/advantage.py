"""An advantage function of your own: rank rollouts within their group, whatever the size of their rewards.

In an `rl` stage: `advantage: {fn: ./advantage.py:rank_advantage, args: {tie_breaker: format}}`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def rank_advantage(
    totals: Sequence[float], terms: Mapping[str, Sequence[float]], *, tie_breaker: str | None = None
) -> list[float]:
    """Return each rollout's rank among its siblings, from -1 for the worst to 1 for the best.

    Args:
        totals: total reward of each rollout of one group.
        terms: values of each reward term, by its name in YAML, before weights.
        tie_breaker: reward term that decides between equal totals; without it they share a rank.
    """
    keys = [(total, terms[tie_breaker][index] if tie_breaker else 0.0) for index, total in enumerate(totals)]
    if len(keys) < 2:
        return [0.0] * len(keys)
    advantages = []
    for key in keys:
        worse = sum(other < key for other in keys)
        better = sum(other > key for other in keys)
        advantages.append((worse - better) / (len(keys) - 1))
    return advantages
