"""From the rewards of a step to the advantages of its rollouts. A row holds the rewards of one group.

Where a mean or a deviation is asked of rewards that do not differ, every advantage is exactly 0, since what rounding
leaves must not become a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum, isfinite, sqrt

from mmrl.config.schema import Advantage, Uncertainty
from mmrl.types import Group, UserError

SAME = 1e-9
"""Rewards closer than this are equal: weighted sums of equal rewards may differ by rounding."""

Rows = Sequence[Sequence[float]]


def advantages(groups: Sequence[Group], options: Advantage, weights: Mapping[str, float]) -> list[tuple[float, ...]]:
    """The advantages of a step's groups, none for a group without rollouts; `weights` are those of the reward terms.

    Raises:
        ValueError: a group with a reward that is not finite.
        UserError: a group lacks the term that its uncertainty is read from.
    """
    judged = [group for group in groups if group.scores]
    for group in judged:
        _refuse_unusable(group)
    rows = iter(_of_judged(judged, options, weights) if judged else ())
    return [next(rows) if group.scores else () for group in groups]


def _of_judged(groups: Sequence[Group], options: Advantage, weights: Mapping[str, float]) -> list[tuple[float, ...]]:
    if options.combine == "total":
        rows = relative([group.totals for group in groups], options)
    else:
        rows = _per_term(groups, options, weights)
    if options.whiten:
        rows = whitened(rows, options.eps)
    if options.z_filter is not None:
        rows = without_outliers(rows, options.z_filter)
    if options.uncertainty is not None:
        rows = [_weighed(row, group, options.uncertainty) for row, group in zip(rows, groups, strict=True)]
    return rows


def informative(rewards: Sequence[float]) -> bool:
    """Whether rewards tell better from worse: they are not all equal."""
    return max(rewards) - min(rewards) > SAME


def relative(rows: Rows, options: Advantage) -> list[tuple[float, ...]]:
    """A_i = (R_i - baseline) / scale.

    Baselines: the group's mean, GRPO (DeepSeekMath, arXiv:2402.03300 v3, 4.1.2); the mean of the others, RLOO
    (arXiv:2402.14740, eq. 6), which is the group's times G / (G - 1); the step's mean, REINFORCE++ (arXiv:2501.03262).
    Scales: the paper does not say which standard deviation GRPO means; this is the sample one (divisor G - 1) plus
    `eps`, as torch.std in TRL and its relatives; none is Dr.GRPO's (arXiv:2503.20783, 3.2); the deviation of R over the
    step is Lite PPO's (arXiv:2508.08221).
    """
    step = _flat(rows)
    return [_relative(row, step, options) for row in rows]


def whitened(rows: Rows, eps: float) -> list[tuple[float, ...]]:
    """(A_i - mean(A)) / (std(A) + eps) over the whole step, sample deviation.

    Source: REINFORCE++ (arXiv:2501.03262, eq. 10), and the last step of GDPO (arXiv:2601.05242). Departure: a rollout
    counts once, however many tokens it has. A mean that is 0 up to rounding is not subtracted: exact 0 stays.
    """
    everything = _flat(rows)
    if not informative(everything):
        return [(0.0,) * len(row) for row in rows]
    mean = _mean(everything)
    origin, width = (mean if abs(mean) > SAME else 0.0), _deviation(everything) + eps
    return [tuple((value - origin) / width for value in row) for row in rows]


def without_outliers(rows: Rows, most: float) -> list[tuple[float, ...]]:
    """Advantages further than `most` sample deviations from the step's mean become 0; the others stay as they are.

    Source: the advantage filter of StableReinforce (R1-Reward, arXiv:2505.02835, 4.1), on the z-score as in the paper
    (its code compares the advantage itself).
    """
    everything = _flat(rows)
    if not informative(everything):
        return [tuple(row) for row in rows]
    mean, limit = _mean(everything), most * _deviation(everything)
    return [tuple(value if abs(value - mean) <= limit else 0.0 for value in row) for row in rows]


def uncertainty(share: float, factor: float) -> float:
    """4 factor p (1 - p): factor at p = 1/2, 0 where a group is all right or all wrong.

    Source: Observe-R1 (arXiv:2505.12432), dynamic weighting, there with factor 1.8.
    """
    return 4.0 * factor * share * (1.0 - share)


def _per_term(groups: Sequence[Group], options: Advantage, weights: Mapping[str, float]) -> list[tuple[float, ...]]:
    """GDPO (arXiv:2601.05242): every reward term normalised by itself, then summed by weight."""
    sums = [[0.0] * len(group.scores) for group in groups]
    for name in dict.fromkeys(name for group in groups for name in group.scores[0].terms):
        having = [i for i, group in enumerate(groups) if name in group.scores[0].terms]
        rows = relative([[score.terms[name].value for score in groups[i].scores] for i in having], options)
        for i, row in zip(having, rows, strict=True):
            sums[i] = [total + weights[name] * value for total, value in zip(sums[i], row, strict=True)]
    return [tuple(row) for row in sums]


def _relative(row: Sequence[float], step: Sequence[float], options: Advantage) -> tuple[float, ...]:
    wanted = {options.baseline, options.scale} - {"none"}
    compared = row if wanted & {"group_mean", "leave_one_out", "group_std"} else step
    if wanted and not informative(compared):
        return (0.0,) * len(row)
    width = 1.0
    if options.scale != "none":
        width = _deviation(row if options.scale == "group_std" else step) + options.eps
    match options.baseline:
        case "group_mean":
            origins = [_mean(row)] * len(row)
        case "leave_one_out":
            origins = [(fsum(row) - reward) / (len(row) - 1) for reward in row]
        case "batch_mean":
            origins = [_mean(step)] * len(row)
        case "none":
            origins = [0.0] * len(row)
    return tuple((reward - origin) / width for reward, origin in zip(row, origins, strict=True))


def _weighed(row: Sequence[float], group: Group, options: Uncertainty) -> tuple[float, ...]:
    if options.term not in group.scores[0].terms:
        raise UserError(
            f"advantage.uncertainty.term {options.term!r}: sample {group.prompt.sample.id} has no such reward term, "
            f"only {', '.join(group.scores[0].terms)}"
        )
    weight = uncertainty(_mean([score.terms[options.term].value for score in group.scores]), options.factor)
    return tuple(weight * value for value in row)


def _refuse_unusable(group: Group) -> None:
    rewards = [*group.totals, *(term.value for score in group.scores for term in score.terms.values())]
    if not all(isfinite(reward) for reward in rewards):
        raise ValueError(f"sample {group.prompt.sample.id}: a group needs finite rewards, got {list(group.totals)}")


def _flat(rows: Rows) -> list[float]:
    return [value for row in rows for value in row]


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    """The sample standard deviation of two values or more."""
    mean = _mean(values)
    return sqrt(fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
