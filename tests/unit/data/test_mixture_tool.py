"""tools/mixture.py: the quadratic that made the scores is found again, and so is its maximum."""

import json
from itertools import product

import numpy as np
import pytest
from tool_modules import load_tool


@pytest.fixture(scope="module")
def tool():
    return load_tool("mixture")


def grid(k, n=60):
    """Every mixture of k sources in steps of 1/n."""
    points = [point for point in product(range(n + 1), repeat=k - 1) if sum(point) <= n]
    return np.array([(*point, n - sum(point)) for point in points]) / n


@pytest.mark.parametrize("seed", range(5))
def test_a_fit_finds_the_coefficients_and_the_maximum(tool, seed):
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=6)
    shares = rng.dirichlet(np.ones(3), size=12)
    scores = tool.quadratic_features(shares) @ truth
    found = tool.fit(shares, scores)
    assert found == pytest.approx(truth, abs=1e-8)
    assert tool.leave_one_out_predictions(shares, scores) == pytest.approx(scores, abs=1e-6)
    everywhere = grid(3)
    greatest = (tool.quadratic_features(everywhere) @ truth).max()
    at_best = (tool.quadratic_features(tool.best_shares(found, 3)[None]) @ truth).item()
    assert greatest - 1e-6 <= at_best <= greatest + 0.01


def test_every_quadratic_on_the_simplex_can_be_fitted(tool):
    """a + b w + w C w with random a, b and C is fitted exactly."""
    rng = np.random.default_rng(9)
    a, b, c = rng.normal(), rng.normal(size=3), rng.normal(size=(3, 3))
    shares = rng.dirichlet(np.ones(3), size=15)
    scores = a + shares @ b + np.einsum("ni,ij,nj->n", shares, c, shares)
    assert tool.quadratic_features(shares) @ tool.fit(shares, scores) == pytest.approx(scores)


def test_each_pilot_is_predicted_by_the_others(tool):
    rng = np.random.default_rng(3)
    shares, scores = rng.dirichlet(np.ones(2), size=7), rng.normal(size=7)
    slow = []
    for k in range(7):
        kept = np.arange(7) != k
        slow.append((tool.quadratic_features(shares[k : k + 1]) @ tool.fit(shares[kept], scores[kept])).item())
    assert tool.leave_one_out_predictions(shares, scores) == pytest.approx(slow)


@pytest.fixture
def run_tool(tool, tmp_path):
    def run(rows):
        path = tmp_path / "pilots.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return tool.main([str(path)])

    return run


def test_the_command_prints_the_best_weights(run_tool, capsys):
    """score = 1 - (w_a - 0.7)^2 on pilots at 0, 0.25, ..., 1."""
    rows = [{"weights": {"a": 4 * w, "b": 4 - 4 * w}, "score": 1 - (w - 0.7) ** 2} for w in (0, 0.25, 0.5, 0.75, 1)]
    assert run_tool(rows) == 0
    output = capsys.readouterr().out
    for words in ("a: weight 0.700", "b: weight 0.300", "predicted at the maximum: 1.0000"):
        assert words in output


@pytest.mark.parametrize(
    ("weights", "score", "count", "message"),
    [
        ({"a": 1, "b": 1}, 1, 3, "2 sources have 3 coefficients, and there are 3 pilots"),
        ({"a": 1, "b": 1}, 1, 4, "the mixtures fix only 1 of 3 coefficients"),
        ({"a": 0, "b": 0}, 1, 4, "pilots.jsonl:1: weights must be 0 or more, one of them"),
        ({"a": -1, "b": 2}, 1, 4, "pilots.jsonl:1: weights must be 0 or more"),
        ({"a": 1, "b": 2}, float("nan"), 4, "and the score finite"),
    ],
)
def test_pilots_that_determine_no_mixture_are_refused(run_tool, capsys, weights, score, count, message):
    assert run_tool([{"weights": weights, "score": score}] * count) == 2
    assert message in capsys.readouterr().err
