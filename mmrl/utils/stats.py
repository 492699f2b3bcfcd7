"""Statistics of evaluation: means and shares with intervals, tests of differences, pass@k and majority votes.

scipy is not used on purpose. Its Wilson interval takes only whole successes, but a question with several responses
counts as a fraction of one. Its binomial test rounds, and McNemar's test below is exact. Random numbers come from a
seed, so that the same values always give the same interval.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb, sqrt
from statistics import fmean, stdev
from typing import Final

import numpy as np

Z95: Final = 1.959963984540054
"""Two-sided 95 % point of the normal distribution."""
# The same to six decimals, for the intervals of mean rewards; Z95 would change their last digits in summary.json.
_ROUNDED_Z95: Final = 1.959964
_NUM_RESAMPLES: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanWithInterval(Interval):
    """A mean with its 95 % interval and the number of values."""

    n: int  # number of values


@dataclass(frozen=True, slots=True, kw_only=True)
class McNemarResult:
    """Counts of questions that two runs got right, and McNemar's test on them."""

    a_only: int  # questions that only the first run got right
    b_only: int  # questions that only the second run got right
    p_value: float  # two-sided, in [0, 1]


def mean_with_interval(values: Sequence[float]) -> MeanWithInterval:
    """Return the mean with its normal-approximation interval, mean -/+ 1.96 s / sqrt(n), s the sample deviation.

    A single value has an infinite interval.
    """
    half_width = _ROUNDED_Z95 * stdev(values) / sqrt(len(values)) if len(values) > 1 else float("inf")
    mean = fmean(values)
    return MeanWithInterval(value=mean, low=mean - half_width, high=mean + half_width, n=len(values))


def paired_improvement(before: Mapping[str, float], after: Mapping[str, float]) -> MeanWithInterval:
    """Return the mean change over the same samples, paired by id. Raises ValueError if they are not the same."""
    if before.keys() != after.keys():
        raise ValueError(f"cannot pair {len(before)} samples with {len(after)} others")
    return mean_with_interval([after[sample] - before[sample] for sample in before])


def wilson_interval(successes: float, trials: int) -> Interval:
    """Return the share of successes with Wilson's score interval; (0, 0, 1) for no trials.

    A success may be a fraction: the mean of several responses to one question.

    Source: Wilson 1927, (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), without continuity correction.

    Raises:
        ValueError: successes are negative or more than trials.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} of {trials} cannot be right")
    if trials == 0:
        return Interval(value=0.0, low=0.0, high=1.0)
    share, z2 = successes / trials, Z95**2
    centre, scale = share + z2 / (2 * trials), 1.0 + z2 / trials
    half_width = Z95 * sqrt(share * (1.0 - share) / trials + z2 / (4 * trials**2))
    return Interval(
        value=share, low=max(0.0, (centre - half_width) / scale), high=min(1.0, (centre + half_width) / scale)
    )


def cluster_bootstrap(
    values: Sequence[float], clusters: Sequence[Hashable], *, seed: int = 0, num_resamples: int = _NUM_RESAMPLES
) -> Interval:
    """Return the mean with a percentile interval over resampled clusters.

    `values` and `clusters` have an entry for each question.

    Source: the cluster bootstrap, Davison and Hinkley 1997, section 3.8; the mean of a draw is over all its questions.

    Raises:
        ValueError: there are no values, or not one cluster for each.
    """
    if not values or len(values) != len(clusters):
        raise ValueError(f"{len(values)} values in {len(clusters)} clusters cannot be resampled")
    # Questions on one image are right or wrong together, so images (clusters) are resampled, not questions. First the
    # sum and number of the values of each cluster, in order of appearance.
    index_of: dict[Hashable, int] = {}
    cluster_indices = np.array([index_of.setdefault(cluster, len(index_of)) for cluster in clusters])
    sums, sizes = np.bincount(cluster_indices, weights=values), np.bincount(cluster_indices)
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(num_resamples):
        drawn = rng.integers(0, len(sums), len(sums))
        means.append(sums[drawn].sum() / sizes[drawn].sum())
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(value=float(np.mean(values)), low=float(low), high=float(high))


def paired_cluster_bootstrap(a: Sequence[float], b: Sequence[float], clusters: Sequence[Hashable]) -> Interval:
    """Return the mean of a - b with the interval of `cluster_bootstrap`. Raises ValueError for different lengths."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values cannot be paired with {len(b)}")
    # The difference of a pair is resampled, so a and b are drawn together.
    return cluster_bootstrap([first - second for first, second in zip(a, b, strict=True)], clusters)


def mcnemar_test(a: Mapping[str, bool], b: Mapping[str, bool]) -> McNemarResult:
    """Return McNemar's exact test of two runs' verdicts by question.

    It is a two-sided binomial test, p = 1/2, over the questions on which the runs differ.

    Raises:
        ValueError: the runs did not answer the same questions.
    """
    if a.keys() != b.keys():
        raise ValueError(f"{len(a.keys() ^ b.keys())} questions are only in one of the runs")
    pairs = Counter((a[name], b[name]) for name in a)
    a_only, b_only = pairs[True, False], pairs[False, True]
    num_differing = a_only + b_only
    # Whole numbers until the last division: 2**n overflows a float from n = 1024 on.
    tail = sum(comb(num_differing, count) for count in range(min(a_only, b_only) + 1))
    p_value = min(1.0, float(Fraction(2 * tail, 2**num_differing)))
    return McNemarResult(a_only=a_only, b_only=b_only, p_value=p_value)


def pass_at_k(num_correct: int, num_samples: int, k: int) -> float:
    """Return the chance that one of k responses or more, drawn without replacement, is correct: 1 - C(n-c,k) / C(n,k).

    Source: the unbiased estimator of Chen et al. (arXiv:2107.03374, eq. 1), with c = `num_correct`, n = `num_samples`.

    Raises:
        ValueError: k is not from 1 to n, or c not from 0 to n.
    """
    if not (1 <= k <= num_samples and 0 <= num_correct <= num_samples):
        raise ValueError(f"pass@{k} of {num_correct} right among {num_samples} is not defined")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def maj_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """Return the share of runs of k consecutive answers whose majority is correct; a rest of fewer than k is ignored.

    If equal answers have different verdicts, the verdict of the first one counts. At k = 1 it is pass@1.

    `answers` and `correct` have an entry for each response; an answer None is not a vote.

    Source: self-consistency (arXiv:2203.11171), unweighted.

    Raises:
        ValueError: k is not from 1 to the number of answers.
    """
    if not 1 <= k <= len(answers) or len(answers) != len(correct):
        raise ValueError(f"maj@{k} of {len(answers)} answers and {len(correct)} verdicts is not defined")
    verdicts = []
    for start in range(0, len(answers) - k + 1, k):
        votes = answers[start : start + k]
        counts = Counter(answer for answer in votes if answer is not None)
        # Of several answers that were given most often, this is the one given first.
        majority = max(counts, key=counts.__getitem__, default=None)
        verdicts.append(majority is not None and correct[start + list(votes).index(majority)])
    return fmean(verdicts)
