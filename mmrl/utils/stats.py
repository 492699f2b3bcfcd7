"""Means and differences with their confidence intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

Z95 = 1.959964
"""Two-sided 95 % point of the standard normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanWithInterval:
    """A mean with its 95 % confidence interval."""

    value: float
    low: float
    """Lower end; minus infinity for a single value."""
    high: float
    """Upper end; infinity for a single value."""
    n: int
    """Number of values behind the mean."""


def mean_with_interval(values: Sequence[float]) -> MeanWithInterval:
    """Return the mean and its normal-approximation interval: mean ± 1.96 s / sqrt(n), s the sample deviation."""
    mean = fmean(values)
    half_width = Z95 * stdev(values) / sqrt(len(values)) if len(values) > 1 else float("inf")
    return MeanWithInterval(value=mean, low=mean - half_width, high=mean + half_width, n=len(values))


def paired_improvement(before: Mapping[str, float], after: Mapping[str, float]) -> MeanWithInterval:
    """Return the mean change of the same samples, paired by id, with its interval.

    Raises:
        ValueError: the two were not measured on the same samples.
    """
    if before.keys() != after.keys():
        raise ValueError(f"cannot pair {len(before)} samples with {len(after)} others")
    return mean_with_interval([after[sample_id] - before[sample_id] for sample_id in before])
