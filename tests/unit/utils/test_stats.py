"""Each statistic against an independent computation: scipy, enumeration, or simulation by hand."""

from itertools import combinations, product
from math import comb, inf

import numpy as np
import pytest
from scipy.stats import binomtest

from mmrl.utils import stats


@pytest.mark.parametrize(("right", "of"), [(0, 1), (1, 1), (3, 7), (348, 1000), (999, 1000), (0, 50)])
def test_wilson_interval_equals_scipy(right, of):
    ours = stats.wilson_interval(right, of)
    theirs = binomtest(right, of).proportion_ci(method="wilson")
    assert (ours.value, ours.low, ours.high) == pytest.approx((right / of, theirs.low, theirs.high), abs=1e-12)


def test_wilson_interval_of_no_samples_is_everything():
    assert stats.wilson_interval(0, 0) == stats.Interval(value=0.0, low=0.0, high=1.0)


@pytest.mark.parametrize(("a_only", "b_only"), [(0, 0), (1, 0), (5, 5), (191, 111), (97, 126), (1000, 900)])
def test_mcnemar_equals_the_exact_binomial_test(a_only, b_only):
    a = {f"a{n}": True for n in range(a_only)} | {f"b{n}": False for n in range(b_only)} | {"both": True, "none": False}
    b = {name: not right for name, right in a.items()} | {"both": True, "none": False}
    flips = stats.mcnemar_test(a, b)
    expected = binomtest(a_only, a_only + b_only).pvalue if a_only + b_only else 1.0
    assert (flips.a_only, flips.b_only) == (a_only, b_only)
    assert flips.p_value == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: stats.wilson_interval(3, 2), "3 of 2"),
        (lambda: stats.mcnemar_test({"1": True, "2": True}, {"1": True, "3": True}), "2 questions"),
        (lambda: stats.paired_cluster_bootstrap([1.0], [1.0, 0.0], ["1", "2"]), "1 values"),
        (lambda: stats.cluster_bootstrap([], []), "0 values"),
        (lambda: stats.pass_at_k(1, 4, 5), "pass@5"),
        (lambda: stats.maj_at_k(["A"], [True], 3), "maj@3"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(("right", "of", "k"), [(0, 4, 2), (1, 4, 2), (2, 4, 2), (2, 5, 3), (4, 4, 1), (3, 6, 6)])
def test_pass_at_k_counts_every_draw(right, of, k):
    draws = [*combinations([True] * right + [False] * (of - right), k)]
    assert stats.pass_at_k(right, of, k) == pytest.approx(sum(map(any, draws)) / comb(of, k))


@pytest.mark.parametrize(
    ("answers", "correct", "k", "expected"),
    [
        (["A", "B", "B", None, None, None], [False, True, True, False, False, False], 6, 1.0),
        (["B", "A", "A", "B"], [True, False, False, True], 4, 1.0),  # a tie goes to the one given first
        ([None], [True], 1, 0.0),
        (["A", "A", "B", "B", "A"], [False, False, True, True, False], 2, 0.5),  # AA and BB; the fifth begins no run
        (["A", "B", "B"], [False, True, True], 1, 2 / 3),
    ],
)
def test_maj_at_k_by_hand(answers, correct, k, expected):
    assert stats.maj_at_k(answers, correct, k) == pytest.approx(expected)


def test_the_bootstrap_finds_the_distribution_it_enumerates():
    """Three clusters have 27 draws; the quantiles of their means are known."""
    values, clusters = [1.0, 1.0, 0.0, 0.0, 1.0], ["a", "a", "b", "c", "c"]
    sums, sizes = {"a": 2, "b": 0, "c": 1}, {"a": 2, "b": 1, "c": 2}
    means = [sum(sums[c] for c in draw) / sum(sizes[c] for c in draw) for draw in product("abc", repeat=3)]
    ours = stats.cluster_bootstrap(values, clusters, num_resamples=20_000)
    assert ours.value == pytest.approx(0.6)
    assert (ours.low, ours.high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975], method="inverted_cdf")))


def test_clusters_widen_the_interval():
    values = [1.0, 0.0] * 50
    alone = stats.cluster_bootstrap(values, range(100))
    together = stats.cluster_bootstrap(sorted(values), [n // 10 for n in range(100)])
    assert together.high - together.low > 2 * (alone.high - alone.low)
    assert alone.high - alone.low == pytest.approx(2 * 1.96 * 0.05, rel=0.1)  # the normal approximation


def test_the_bootstrap_is_seeded():
    values = [1.0] * 20 + [0.0] * 31
    assert stats.cluster_bootstrap(values, range(51)) == stats.cluster_bootstrap(values, range(51))
    assert stats.cluster_bootstrap(values, range(51), seed=1) != stats.cluster_bootstrap(values, range(51), seed=2)


def test_pairing_removes_what_both_share():
    rng = np.random.default_rng(0)
    hard = rng.random(200)
    a, b = (hard > 0.4).astype(float).tolist(), (hard > 0.45).astype(float).tolist()
    gap = stats.paired_cluster_bootstrap(a, b, range(200))
    assert gap.value == pytest.approx(np.mean(a) - np.mean(b))
    assert 0.0 < gap.low < gap.value < gap.high < 0.12


def test_mean_and_its_interval_equal_numpy():
    values = np.random.default_rng(0).random(50).tolist()
    found = stats.mean_with_interval(values)
    half = 1.959964 * np.std(values, ddof=1) / 50**0.5
    assert (found.value, found.low, found.high) == pytest.approx(
        (np.mean(values), np.mean(values) - half, np.mean(values) + half)
    )
    assert found.n == 50
    single = stats.mean_with_interval([0.5])
    assert (single.value, single.low, single.high, single.n) == (0.5, -inf, inf, 1)


def test_interval_of_a_mean_covers_the_truth_about_95_times_in_100():
    generator = np.random.default_rng(0)
    found = [stats.mean_with_interval(generator.random(40).tolist()) for _ in range(1000)]
    assert 0.93 < np.mean([interval.low < 0.5 < interval.high for interval in found]) < 0.97


def test_improvement_is_paired_by_id():
    before = {"a": 0.1, "b": 0.5, "c": 0.9}
    found = stats.paired_improvement(before, {"c": 1.0, "b": 0.6, "a": 0.2})
    assert (found.value, found.n) == (pytest.approx(0.1), 3)
    assert found.high - found.low == pytest.approx(0.0, abs=1e-12)  # every sample improved by the same
    for after in ({"a": 0.2, "b": 0.6}, {"a": 0.2, "b": 0.6, "d": 1.0}):
        with pytest.raises(ValueError, match="cannot pair 3 samples"):
            stats.paired_improvement(before, after)
