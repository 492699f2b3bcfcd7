"""From the rewards of a step to the advantages of its rollouts. A row holds the rewards of one group.

Where a mean or a deviation is asked of rewards that do not differ, every advantage is exactly 0, since what rounding
leaves must not become a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum, isfinite, sqrt

from mmrl.config.schema import AdvantageConfig, DifficultyWeightConfig
from mmrl.types import Group, UserError

EQUALITY_TOLERANCE = 1e-9
"""Rewards closer than this are equal: weighted sums of equal rewards may differ by rounding."""

RewardRows = Sequence[Sequence[float]]


def compute_advantages(
    groups: Sequence[Group], options: AdvantageConfig, weights: Mapping[str, float]
) -> list[tuple[float, ...]]:
    """The advantages of a step's groups, none for a group without rollouts; `weights` are those of the reward terms.

    Raises:
        ValueError: a group with a reward that is not finite.
        UserError: a group lacks the term that its uncertainty is read from.
    """
    judged = [group for group in groups if group.scores]
    for group in judged:
        _check_finite_rewards(group)
    rows = iter(_compute_for_scored_groups(judged, options, weights) if judged else ())
    return [next(rows) if group.scores else () for group in groups]


def _compute_for_scored_groups(
    groups: Sequence[Group], options: AdvantageConfig, weights: Mapping[str, float]
) -> list[tuple[float, ...]]:
    if options.combine == "total":
        rows = normalize_rewards([group.totals for group in groups], options)
    else:
        rows = _normalize_per_term(groups, options, weights)
    if options.batch_normalize:
        rows = batch_normalize(rows, options.eps)
    if options.outlier_std is not None:
        rows = zero_outliers(rows, options.outlier_std)
    if options.difficulty_weight is not None:
        rows = [
            _apply_difficulty_weight(row, group, options.difficulty_weight)
            for row, group in zip(rows, groups, strict=True)
        ]
    return rows


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Whether rewards tell better from worse: they are not all equal."""
    return max(rewards) - min(rewards) > EQUALITY_TOLERANCE


def normalize_rewards(rows: RewardRows, options: AdvantageConfig) -> list[tuple[float, ...]]:
    """A_i = (R_i - baseline) / scale.

    Baselines: the group's mean, GRPO (DeepSeekMath, arXiv:2402.03300 v3, 4.1.2); the mean of the others, RLOO
    (arXiv:2402.14740, eq. 6), which is the group's times G / (G - 1); the step's mean, REINFORCE++ (arXiv:2501.03262).
    Scales: the paper does not say which standard deviation GRPO means; this is the sample one (divisor G - 1) plus
    `eps`, as torch.std in TRL and its relatives; none is Dr.GRPO's (arXiv:2503.20783, 3.2); the deviation of R over the
    step is Lite PPO's (arXiv:2508.08221).
    """
    step = _flatten(rows)
    return [_normalize_row(row, step, options) for row in rows]


def batch_normalize(rows: RewardRows, eps: float) -> list[tuple[float, ...]]:
    """(A_i - mean(A)) / (std(A) + eps) over the whole step, sample deviation.

    Source: REINFORCE++ (arXiv:2501.03262, eq. 10), and the last step of GDPO (arXiv:2601.05242). Departure: a rollout
    counts once, however many tokens it has. A mean that is 0 up to rounding is not subtracted: exact 0 stays.
    """
    everything = _flatten(rows)
    if not rewards_differ(everything):
        return [(0.0,) * len(row) for row in rows]
    mean = _mean(everything)
    origin, width = (mean if abs(mean) > EQUALITY_TOLERANCE else 0.0), _sample_std(everything) + eps
    return [tuple((value - origin) / width for value in row) for row in rows]


def zero_outliers(rows: RewardRows, max_std: float) -> list[tuple[float, ...]]:
    """Advantages further than `most` sample deviations from the step's mean become 0; the others stay as they are.

    Source: the advantage filter of StableReinforce (R1-Reward, arXiv:2505.02835, 4.1), on the z-score as in the paper
    (its code compares the advantage itself).
    """
    everything = _flatten(rows)
    if not rewards_differ(everything):
        return [tuple(row) for row in rows]
    mean, limit = _mean(everything), max_std * _sample_std(everything)
    return [tuple(value if abs(value - mean) <= limit else 0.0 for value in row) for row in rows]


def difficulty_weight(pass_rate: float, factor: float) -> float:
    """4 factor p (1 - p): factor at p = 1/2, 0 where a group is all right or all wrong.

    Source: Observe-R1 (arXiv:2505.12432), dynamic weighting, there with factor 1.8.
    """
    return 4.0 * factor * pass_rate * (1.0 - pass_rate)


def _normalize_per_term(
    groups: Sequence[Group], options: AdvantageConfig, weights: Mapping[str, float]
) -> list[tuple[float, ...]]:
    """GDPO (arXiv:2601.05242): every reward term normalised by itself, then summed by weight."""
    sums = [[0.0] * len(group.scores) for group in groups]
    for name in dict.fromkeys(name for group in groups for name in group.scores[0].terms):
        having = [i for i, group in enumerate(groups) if name in group.scores[0].terms]
        rows = normalize_rewards([[score.terms[name].value for score in groups[i].scores] for i in having], options)
        for i, row in zip(having, rows, strict=True):
            sums[i] = [total + weights[name] * value for total, value in zip(sums[i], row, strict=True)]
    return [tuple(row) for row in sums]


def _normalize_row(row: Sequence[float], step: Sequence[float], options: AdvantageConfig) -> tuple[float, ...]:
    wanted = {options.baseline, options.scale} - {"none"}
    compared = row if wanted & {"group_mean", "leave_one_out", "group_std"} else step
    if wanted and not rewards_differ(compared):
        return (0.0,) * len(row)
    width = 1.0
    if options.scale != "none":
        width = _sample_std(row if options.scale == "group_std" else step) + options.eps
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


def _apply_difficulty_weight(row: Sequence[float], group: Group, options: DifficultyWeightConfig) -> tuple[float, ...]:
    if options.term not in group.scores[0].terms:
        raise UserError(
            f"advantage.uncertainty.term {options.term!r}: sample {group.prompt.sample.id} has no such reward term, "
            f"only {', '.join(group.scores[0].terms)}"
        )
    weight = difficulty_weight(_mean([score.terms[options.term].value for score in group.scores]), options.max_weight)
    return tuple(weight * value for value in row)


def _check_finite_rewards(group: Group) -> None:
    rewards = [*group.totals, *(term.value for score in group.scores for term in score.terms.values())]
    if not all(isfinite(reward) for reward in rewards):
        raise ValueError(f"sample {group.prompt.sample.id}: a group needs finite rewards, got {list(group.totals)}")


def _flatten(rows: RewardRows) -> list[float]:
    return [value for row in rows for value in row]


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)


def _sample_std(values: Sequence[float]) -> float:
    """The sample standard deviation of two values or more."""
    mean = _mean(values)
    return sqrt(fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
