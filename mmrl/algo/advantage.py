"""From the rewards of a group to the advantages of its rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, isfinite, sqrt
from typing import Literal

SAME = 1e-9
"""Totals closer than this are equal: weighted sums of equal rewards may differ by rounding."""


def informative(totals: Sequence[float]) -> bool:
    """Whether a group tells better from worse: its totals are not all equal."""
    return max(totals) - min(totals) > SAME


def advantages(
    totals: Sequence[float],
    *,
    baseline: Literal["group_mean", "none"],
    scale: Literal["group_std", "none"],
    eps: float,
) -> tuple[float, ...]:
    """A_i = (R_i - baseline) / scale for the totals R of one group.

    Source: GRPO's outcome supervision, DeepSeekMath (arXiv:2402.03300 v3, 4.1.2), which does not say which standard
    deviation: this is the sample one (divisor G - 1), as torch.std in TRL and its relatives, plus `eps`. Without scale
    it is Dr.GRPO's (arXiv:2503.20783, 3.2). Departure: where a mean or deviation is asked of a group without
    differences, every advantage is exactly 0, since what rounding leaves must not become a gradient.

    Raises:
        ValueError: an empty group, or a total that is not finite.
    """
    if not totals or not all(isfinite(total) for total in totals):
        raise ValueError(f"a group needs finite totals, got {list(totals)}")
    if not informative(totals) and (baseline, scale) != ("none", "none"):
        return (0.0,) * len(totals)
    mean = fsum(totals) / len(totals)
    origin = mean if baseline == "group_mean" else 0.0
    width = _deviation(totals, mean) + eps if scale == "group_std" else 1.0
    return tuple((total - origin) / width for total in totals)


def _deviation(totals: Sequence[float], mean: float) -> float:
    return sqrt(fsum((total - mean) ** 2 for total in totals) / (len(totals) - 1))
