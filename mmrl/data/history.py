"""What became of each sample whenever it was drawn, and what that says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import zip_longest
from statistics import fmean, pstdev
from typing import Final

from mmrl.types import Group, SampleStats

RewardHistory = Mapping[str, Sequence[SampleStats]]
"""Sample id → its visits, in order."""


def compute_sample_stats(group: Group, terms: Sequence[str]) -> SampleStats | None:
    """Mean and standard deviation, over a group's judged rollouts, of the mean of those of `terms` that apply."""
    values = []
    for score in group.scores:
        said = [score.terms[name].value for name in terms if name in score.terms]
        if said:
            values.append(fmean(said))
    return SampleStats(fmean(values), pstdev(values)) if values else None


def record_rewards(
    history: MutableMapping[str, list[SampleStats]], groups: Sequence[Group], terms: Sequence[str]
) -> list[float]:
    """Add what groups say of their samples to `history`; returns the means that were added."""
    means = []
    for group in groups:
        if (found := compute_sample_stats(group, terms)) is not None:
            history.setdefault(group.prompt.sample.id, []).append(found)
            means.append(found.mean)
    return means


def reward_mean(history: RewardHistory) -> dict[str, float]:
    """Mean reward of each sample over its visits."""
    return {name: fmean(each.mean for each in visits) for name, visits in history.items()}


def reward_std(history: RewardHistory) -> dict[str, float]:
    """Standard deviation of each sample's mean reward over its visits, by which one-example RLVR (arXiv:2504.20571,
    2.2) ranks.
    """
    return {name: pstdev([each.mean for each in visits]) for name, visits in history.items()}


def limr_alignment(history: RewardHistory) -> dict[str, float]:
    """How closely a sample's rewards follow the mean of all: LIMR, arXiv:2502.11886, equation 2.

    s_i = 1 - sum_k (r_ik - m_k)^2 / sum_k (1 - m_k)^2, k counting a sample's visits and m_k being the mean over all
    samples that have a k-th one; 0 where every m_k is 1.
    """
    columns = zip_longest(*history.values())
    means = [fmean(each.mean for each in column if each is not None) for column in columns]
    return {name: _alignment([each.mean for each in visits], means) for name, visits in history.items()}


RANKINGS: Final[Mapping[str, Callable[[RewardHistory], dict[str, float]]]] = {
    "reward_mean": reward_mean,
    "reward_std": reward_std,
    "limr": limr_alignment,
}


def has_plateaued(rewards: Sequence[float], window: int, min_rise: float) -> bool:
    """Whether the mean of the last `window` rewards is less than `rise` above that of the `window` before."""
    if len(rewards) < 2 * window:
        return False
    return fmean(rewards[-window:]) - fmean(rewards[-2 * window : -window]) < min_rise


def _alignment(rewards: Sequence[float], means: Sequence[float]) -> float:
    pairs = list(zip(rewards, means, strict=False))
    room = sum((1.0 - m) ** 2 for _, m in pairs)
    return 1.0 - sum((r - m) ** 2 for r, m in pairs) / room if room else 0.0
