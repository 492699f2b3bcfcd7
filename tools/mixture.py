"""Learn the weights of training sources from pilot runs: fit scores of mixtures by a quadratic, and take its maximum.

    python tools/mixture.py pilots.jsonl

The file has a line for each pilot run: the weights it trained with, by source, and its score on your measure.

    {"weights": {"count": 1, "ground": 3}, "score": 0.61}

As in MoDoMoDo (arXiv:2505.24871). On the simplex every quadratic in the shares w is one of Scheffé's (1958):
score(w) = sum_i b_i w_i + sum_{i<j} c_ij w_i w_j, with k (k + 1) / 2 coefficients for k sources. It needs as many
pilots, and some more to estimate how well it predicts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy.optimize import minimize


def read_pilots(path: Path) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the names of the k sources, and the shares [n, k] and scores [n] of the n pilots.

    Raises:
        ValueError: a pilot has no positive weight, or a score that is not finite; or there are too few.
    """
    pilots = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    names = list(dict.fromkeys(name for pilot in pilots for name in pilot["weights"]))
    weights = np.array([float(pilot["weights"].get(name, 0.0)) for pilot in pilots for name in names])
    weights = weights.reshape(-1, len(names))
    scores = np.array([float(pilot["score"]) for pilot in pilots])
    needed = len(names) * (len(names) + 1) // 2
    if len(pilots) <= needed:
        raise ValueError(
            f"{path}: {len(names)} sources have {needed} coefficients, and there are {len(pilots)} pilots; "
            f"run {needed + 1} or more"
        )
    for number, (row, score) in enumerate(zip(weights, scores, strict=True), 1):
        if not (np.isfinite(row).all() and row.min() >= 0 and row.sum() > 0 and np.isfinite(score)):
            raise ValueError(f"{path}:{number}: weights must be 0 or more, one of them above 0, and the score finite")
    return names, weights / weights.sum(axis=1, keepdims=True), scores


def quadratic_features(shares: np.ndarray) -> np.ndarray:
    """Return shares [n, k] as features [n, k (k + 1) / 2]: each share, then the product of each pair."""
    pairs = [shares[:, i] * shares[:, j] for i, j in combinations(range(shares.shape[1]), 2)]
    return np.column_stack([shares, *pairs])


def fit(shares: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return the coefficients by least squares.

    Raises:
        ValueError: the pilots' mixtures are too similar to fix the coefficients.
    """
    made = quadratic_features(shares)
    coefficients, _, rank, _ = np.linalg.lstsq(made, scores, rcond=None)
    if rank < made.shape[1]:
        raise ValueError(f"the mixtures fix only {rank} of {made.shape[1]} coefficients; run pilots that differ more")
    return coefficients


def leave_one_out_predictions(shares: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return each pilot's prediction by the fit without it, [n]: y - (y - Hy) / (1 - diag H), H the hat matrix."""
    made = quadratic_features(shares)
    hat = made @ np.linalg.pinv(made)
    return scores - (scores - hat @ scores) / (1.0 - np.diag(hat))


def best_shares(coefficients: np.ndarray, num_sources: int) -> np.ndarray:
    """Return the shares [k] of the greatest fitted score that is found from the corners and the centre."""

    def loss(shares: np.ndarray) -> float:
        return -(quadratic_features(shares[None]) @ coefficients).item()

    adds_up = {"type": "eq", "fun": lambda shares: shares.sum() - 1.0}
    search = partial(minimize, loss, bounds=[(0.0, 1.0)] * num_sources, constraints=adds_up, options={"ftol": 1e-12})
    starts = [*np.eye(num_sources), np.full(num_sources, 1.0 / num_sources)]
    return min((search(start).x for start in starts), key=loss)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the best weights, and how far the fit can be trusted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pilots", type=Path)
    options = parser.parse_args(arguments)
    try:
        names, shares, scores = read_pilots(options.pilots)
        coefficients = fit(shares, scores)
    except (OSError, KeyError, ValueError) as error:
        print(f"mixture: {error}", file=sys.stderr)
        return 2
    error = float(np.sqrt(np.mean((leave_one_out_predictions(shares, scores) - scores) ** 2)))
    chosen = best_shares(coefficients, len(names))
    predicted = (quadratic_features(chosen[None]) @ coefficients).item()
    print(f"{len(scores)} pilots: best {scores.max():.4f}, standard deviation {scores.std():.4f}")
    print(f"fitted without it, a pilot is missed by {error:.4f} on average (root mean square)")
    print(f"predicted at the maximum: {predicted:.4f}")
    for name, share in zip(names, chosen, strict=True):
        print(f"  {name}: weight {share:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
