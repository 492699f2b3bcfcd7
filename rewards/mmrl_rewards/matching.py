"""One-to-one matching of what an answer lists with what the target lists, and what a matching is worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


class Matching(NamedTuple):
    """`gains` of the matched pairs; `rows` are the answers in them. Pairs that gain nothing are left out."""

    rows: NDArray[np.intp]
    gains: NDArray[np.float64]
    num_answers: int
    num_targets: int

    @property
    def f1(self) -> float:
        """2 sum(gain) / (answers + targets); 1 when there are none of either."""
        both = self.num_answers + self.num_targets
        return 2.0 * float(self.gains.sum()) / both if both else 1.0

    @property
    def mean_gain(self) -> float:
        """sum(gain) / max(answers, targets); 1 when there are none of either."""
        most = max(self.num_answers, self.num_targets)
        return float(self.gains.sum()) / most if most else 1.0

    @property
    def summary(self) -> str:
        """What a reason says of it."""
        return f"{len(self.gains)} matched of {self.num_answers} answers and {self.num_targets} targets"


def match_one_to_one(gains: Matrix) -> Matching:
    """Return the one-to-one matching of answers (rows) and targets (columns) with the largest sum of gains >= 0."""
    # Many modules import this one, and few runs match anything: only those import scipy.
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(gains, maximize=True)
    matched = gains[rows, columns]
    useful = matched > 0.0
    return Matching(rows[useful], matched[useful], *gains.shape)


def pairwise_box_iou(answers: Matrix, targets: Matrix) -> Matrix:
    """IoU of every answer's box with every target's, (N, 4) with (M, 4) to (N, M)."""
    a, b = answers[:, None], targets[None, :]
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    shared = np.maximum(sides, 0.0).prod(axis=-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).prod(axis=-1) for boxes in (a, b)]
    ious: Matrix = shared / (areas[0] + areas[1] - shared)
    return ious


def match_labels(answers: Sequence[str], targets: Sequence[str]) -> NDArray[np.bool_]:
    """Which answer may stand for which target: case and outer white space aside, the labels agree.

    A target without a label takes any answer; an answer without one fits only such a target.
    """
    wanted = [target.strip().casefold() for target in targets]
    given = [answer.strip().casefold() for answer in answers]
    fits = [[target in ("", answer) for target in wanted] for answer in given]
    return np.array(fits, dtype=np.bool_).reshape(len(given), len(wanted))
