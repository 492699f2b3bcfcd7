"""How sure a score is, and whether two scores differ. Every random number comes from a seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb, sqrt
from statistics import fmean
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Z95: Final = 1.959963984540054
"""Two-sided 95 % point of the normal distribution."""
_NUM_RESAMPLES: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class McNemarResult:
    """Two runs on the same questions: how many only the first, or only the second, has right; `p` of McNemar's test."""

    a_only: int
    b_only: int
    both: int
    neither: int
    p_value: float


def wilson_interval(successes: float, trials: int) -> Interval:
    """Share of successes with Wilson's score interval; (0, 0, 1) of none. A success may be a part of one.

    Source: Wilson 1927, (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), without continuity correction.

    Raises:
        ValueError: more successes than trials, or fewer than none.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} of {trials} cannot be right")
    if trials == 0:
        return Interval(value=0.0, low=0.0, high=1.0)
    share, z2 = successes / trials, Z95**2
    centre, scale = share + z2 / (2 * trials), 1.0 + z2 / trials
    half = Z95 * sqrt(share * (1.0 - share) / trials + z2 / (4 * trials**2))
    return Interval(value=share, low=max(0.0, (centre - half) / scale), high=min(1.0, (centre + half) / scale))


def cluster_bootstrap(
    values: Sequence[float], clusters: Sequence[Hashable], *, seed: int = 0, num_resamples: int = _NUM_RESAMPLES
) -> Interval:
    """Mean with a percentile interval over resampled clusters: questions on one picture stand or fall together.

    Source: the cluster bootstrap, Davison and Hinkley 1997, 3.8; the mean of a draw is over all its questions.

    Raises:
        ValueError: no values, or not one cluster for each.
    """
    if not values or len(values) != len(clusters):
        raise ValueError(f"{len(values)} values in {len(clusters)} clusters cannot be resampled")
    sums, sizes = _cluster_sums(values, clusters)
    rng = np.random.default_rng(seed)
    draw = (rng.integers(0, len(sums), len(sums)) for _ in range(num_resamples))
    means = [sums[drawn].sum() / sizes[drawn].sum() for drawn in draw]
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(value=float(np.mean(values)), low=float(low), high=float(high))


def paired_cluster_bootstrap(
    a: Sequence[float],
    b: Sequence[float],
    clusters: Sequence[Hashable],
    *,
    seed: int = 0,
    num_resamples: int = _NUM_RESAMPLES,
) -> Interval:
    """Mean of a - b with the interval of `bootstrap`, the two resampled together.

    Raises:
        ValueError: not as many of one as of the other.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values cannot be paired with {len(b)}")
    return cluster_bootstrap(
        [one - other for one, other in zip(a, b, strict=True)], clusters, seed=seed, num_resamples=num_resamples
    )


def mcnemar_test(a: Mapping[str, bool], b: Mapping[str, bool]) -> McNemarResult:
    """McNemar's exact test: two-sided binomial, p = 1/2, over the questions on which the two differ.

    Raises:
        ValueError: the two did not answer the same questions.
    """
    if a.keys() != b.keys():
        raise ValueError(f"{len(a.keys() ^ b.keys())} questions are in one run alone")
    pairs = Counter((a[name], b[name]) for name in a)
    a_only, b_only = pairs[True, False], pairs[False, True]
    differing = a_only + b_only
    tail = sum(comb(differing, count) for count in range(min(a_only, b_only) + 1))
    p = min(1.0, float(Fraction(2 * tail, 2**differing)))
    return McNemarResult(a_only=a_only, b_only=b_only, both=pairs[True, True], neither=pairs[False, False], p_value=p)


def pass_at_k(num_correct: int, num_samples: int, k: int) -> float:
    """Chance that one of k responses is right, drawn without replacement from `of`: 1 - C(of - right, k) / C(of, k).

    Source: the unbiased estimator of Chen et al. (arXiv:2107.03374, eq. 1).

    Raises:
        ValueError: k is not from 1 to `of`, or `right` not from 0 to `of`.
    """
    if not (1 <= k <= num_samples and 0 <= num_correct <= num_samples):
        raise ValueError(f"pass@{k} of {num_correct} right among {num_samples} is not defined")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def majority_answer(answers: Sequence[Hashable | None]) -> Hashable | None:
    """The answer given most often, of several the one given first; None stands for none and has no vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    return max(votes, key=votes.__getitem__, default=None)


def maj_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """How often the majority of k answers is right, of the whole runs of k there are one after the other; where equal
    answers were judged apart, the first's verdict. Of k = 1 it is pass@1.

    Source: self-consistency (arXiv:2203.11171), unweighted.

    Raises:
        ValueError: k is not from 1 to how many there are.
    """
    if not 1 <= k <= len(answers) or len(answers) != len(correct):
        raise ValueError(f"maj@{k} of {len(answers)} answers and {len(correct)} verdicts is not defined")
    runs = [(answers[start : start + k], correct[start : start + k]) for start in range(0, len(answers) - k + 1, k)]
    return fmean(_is_majority_correct(*run) for run in runs)


def _is_majority_correct(answers: Sequence[Hashable | None], correct: Sequence[bool]) -> bool:
    chosen = majority_answer(answers)
    return chosen is not None and correct[list(answers).index(chosen)]


def _cluster_sums(values: Sequence[float], clusters: Sequence[Hashable]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Sum and number of the values of each cluster, in order of appearance."""
    places: dict[Hashable, int] = {}
    owner = np.array([places.setdefault(cluster, len(places)) for cluster in clusters])
    return np.bincount(owner, weights=values), np.bincount(owner)
