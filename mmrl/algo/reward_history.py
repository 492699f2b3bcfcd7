"""Rewards of each sample over the steps that drew it: recorded in training, and ranked by later `select` stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import zip_longest
from statistics import fmean, pstdev
from typing import Final

from mmrl.types import Group, SampleStats

RewardHistory = Mapping[str, Sequence[SampleStats]]
"""Sample id → statistics of its group at each visit, oldest first."""


def record_rewards(
    history: MutableMapping[str, list[SampleStats]], groups: Sequence[Group], terms: Sequence[str]
) -> list[float]:
    """Append the statistics of each group to the history of its sample, and return the means that were added.

    A group adds nothing when it has no scored rollout or none of `terms` applies to it.
    """
    means = []
    for group in groups:
        stats = compute_sample_stats(group, terms)
        if stats is not None:
            history.setdefault(group.prompt.sample.id, []).append(stats)
            means.append(stats.mean)
    return means


def compute_sample_stats(group: Group, terms: Sequence[str]) -> SampleStats | None:
    """Return mean and population standard deviation of a group's rewards; None if there are none.

    The reward of one rollout is the mean of those of `terms` that apply to it.
    """
    values = []
    for score in group.scores:
        applicable = []
        for name in terms:
            if name in score.terms:
                applicable.append(score.terms[name].value)
        if applicable:
            values.append(fmean(applicable))
    return SampleStats(fmean(values), pstdev(values)) if values else None


def reward_mean(history: RewardHistory) -> dict[str, float]:
    """Return each sample's mean reward over its visits."""
    return _for_each_sample(history, fmean)


def reward_std(history: RewardHistory) -> dict[str, float]:
    """Return the standard deviation of each sample's mean reward over its visits.

    Source: one-example RLVR ranks samples by it (arXiv:2504.20571, 2.2).
    """
    return _for_each_sample(history, pstdev)


def limr_alignment(history: RewardHistory) -> dict[str, float]:
    """Return how closely each sample's rewards follow the mean over all samples, at most 1.

    s_i = 1 - sum_k (r_ik - m_k)^2 / sum_k (1 - m_k)^2. k counts a sample's visits, and m_k is the mean over all samples
    that have a k-th visit. 0 where every m_k is 1.

    Source: LIMR (arXiv:2502.11886, eq. 2).
    """
    mean_curve = []
    for visits_of_turn in zip_longest(*history.values()):
        # Samples that were drawn less often have no such visit.
        mean_curve.append(fmean(visit.mean for visit in visits_of_turn if visit is not None))
    return _for_each_sample(history, partial(_alignment, mean_curve=mean_curve))


RANKINGS: Final[Mapping[str, Callable[[RewardHistory], dict[str, float]]]] = {
    "reward_mean": reward_mean,
    "reward_std": reward_std,
    "limr": limr_alignment,
}
"""Value of `metric` in a `select` stage → the function that computes it for each sample."""


def has_plateaued(rewards: Sequence[float], window: int, min_rise: float) -> bool:
    """Return True when the mean of the last `window` rewards is less than `min_rise` above that of the `window` before.

    False until there are two full windows.
    """
    if len(rewards) < 2 * window:
        return False
    return fmean(rewards[-window:]) - fmean(rewards[-2 * window : -window]) < min_rise


def _for_each_sample(history: RewardHistory, function: Callable[[Sequence[float]], float]) -> dict[str, float]:
    """Return a function of each sample's mean rewards, one reward for each of its visits."""
    values = {}
    for sample_id, visits in history.items():
        values[sample_id] = function([visit.mean for visit in visits])
    return values


def _alignment(rewards: Sequence[float], mean_curve: Sequence[float]) -> float:
    # A sample drawn less often than others has a shorter curve than the mean, and is compared over its own length.
    distance, largest = 0.0, 0.0
    for reward, mean in zip(rewards, mean_curve, strict=False):
        distance += (reward - mean) ** 2
        largest += (1.0 - mean) ** 2
    return 1.0 - distance / largest if largest else 0.0
