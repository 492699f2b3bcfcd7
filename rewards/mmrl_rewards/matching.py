"""One-to-one matching of an answer's list with the target's list, and the scores of a matching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]  # [answers, targets], or [boxes, 4]


class Matching(NamedTuple):
    """Holds the matched pairs of answers and targets. Pairs with gain 0 are left out."""

    rows: NDArray[np.intp]  # [pairs], index of each pair's answer
    gains: NDArray[np.float64]  # [pairs], above 0
    num_answers: int  # matched or not
    num_targets: int  # matched or not

    @property
    def f1(self) -> float:
        """Return 2 sum(gain) / (answers + targets), or 1 if there are neither answers nor targets."""
        total = self.num_answers + self.num_targets
        return 2.0 * float(self.gains.sum()) / total if total else 1.0

    @property
    def mean_gain(self) -> float:
        """Return sum(gain) / max(answers, targets), or 1 if there are neither answers nor targets."""
        largest = max(self.num_answers, self.num_targets)
        return float(self.gains.sum()) / largest if largest else 1.0

    @property
    def summary(self) -> str:
        """Return the numbers of pairs, answers and targets as text, for the reason of a reward."""
        return f"{len(self.gains)} matched of {self.num_answers} answers and {self.num_targets} targets"


def match_one_to_one(gains: Matrix) -> Matching:
    """Return the one-to-one matching with the largest sum of gains.

    Args:
        gains: value of pairing each answer with each target, [answers, targets], at least 0.
    """
    # Many modules import this one, and few runs match anything: only those import scipy.
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(gains, maximize=True)
    matched = gains[rows, columns]
    useful = matched > 0.0
    return Matching(rows[useful], matched[useful], *gains.shape)


def pairwise_box_iou(answers: Matrix, targets: Matrix) -> Matrix:
    """Return the IoU of every answer's box [answers, 4] with every target's [targets, 4], as [answers, targets]."""
    a, b = answers[:, None], targets[None, :]
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    # Disjoint boxes have a negative side; two negative ones would give a positive area.
    shared = np.maximum(sides, 0.0).prod(axis=-1)
    areas_a, areas_b = (a[..., 2:] - a[..., :2]).prod(axis=-1), (b[..., 2:] - b[..., :2]).prod(axis=-1)
    ious: Matrix = shared / (areas_a + areas_b - shared)
    return ious


def match_labels(answers: Sequence[str], targets: Sequence[str]) -> NDArray[np.bool_]:
    """Return True where an answer's label fits a target's label, [answers, targets].

    Labels fit if they are equal apart from case and outer white space. A target without a label fits any answer. An
    answer without a label fits only such a target.
    """
    target_labels = [target.strip().casefold() for target in targets]
    fits = []
    for answer in answers:
        label = answer.strip().casefold()
        fits.append([target in ("", label) for target in target_labels])
    return np.array(fits, dtype=np.bool_).reshape(len(answers), len(targets))
