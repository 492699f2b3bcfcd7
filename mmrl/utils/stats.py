"""Means, differences and their confidence intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

Z95 = 1.959964
"""Two-sided 95 % point of the normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanWithInterval:
    """A mean with its 95 % interval and the count behind it."""

    value: float
    low: float
    high: float
    n: int


def mean_with_interval(values: Sequence[float]) -> MeanWithInterval:
    """Mean and normal-approximation 95 % interval: value -/+ 1.96 s / sqrt(n), s the sample deviation.

    A single value has an infinite interval.
    """
    half = Z95 * stdev(values) / sqrt(len(values)) if len(values) > 1 else float("inf")
    return MeanWithInterval(value=fmean(values), low=fmean(values) - half, high=fmean(values) + half, n=len(values))


def paired_improvement(before: Mapping[str, float], after: Mapping[str, float]) -> MeanWithInterval:
    """Mean change over the same samples, paired by id.

    Raises:
        ValueError: the two were not measured on the same samples.
    """
    if before.keys() != after.keys():
        raise ValueError(f"cannot pair {len(before)} samples with {len(after)} others")
    return mean_with_interval([after[sample] - before[sample] for sample in before])
