"""Advantages: from the rewards of a step to one number for each of its rollouts.

Functions take rows, one for each group, with one value for each rollout of the group. Where a formula compares rewards
that are equal, every advantage is exactly 0, so that a rounding error never becomes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import fsum, isfinite, pi, sin, sqrt
from statistics import fmean

from mmrl.config.schema import AdvantageConfig, DifficultyWeightConfig
from mmrl.types import Group, UserError

# Rewards closer than this are equal: weighted sums of equal rewards may differ by rounding.
EQUALITY_TOLERANCE = 1e-9

RewardRows = Sequence[Sequence[float]]
"""One row for each group, with one value for each of its rollouts."""

CustomAdvantage = Callable[[Sequence[float], Mapping[str, Sequence[float]]], Sequence[float]]
"""A user's function for one group: `(totals, terms) -> advantages`, one number for each rollout.

`totals` has the total reward of each rollout, `terms` the values of each reward term that applies to the group, by
name, before weights.
"""


def compute_advantages(
    groups: Sequence[Group],
    options: AdvantageConfig,
    weights: Mapping[str, float],
    custom_advantage: CustomAdvantage | None = None,
) -> list[tuple[float, ...]]:
    """Return the advantages of a step's groups, an empty row for a group without scored rollouts.

    `weights` maps each reward term to its weight; only `combine: per_term` reads it. `custom_advantage` is the function
    that `options.fn` names; it replaces `combine`, `baseline` and `scale`.

    Raises:
        ValueError: a group has a reward that is not finite.
        UserError: the custom function does not return one finite number for each rollout.
    """
    scored = [group for group in groups if group.scores]
    if not scored:
        return [()] * len(groups)
    for group in scored:
        rewards = list(group.totals)
        for score in group.scores:
            rewards += [term.value for term in score.terms.values()]
        if not all(map(isfinite, rewards)):
            raise ValueError(f"sample {group.prompt.sample.id}: a group needs finite rewards, got {list(group.totals)}")

    if custom_advantage is not None:
        rows = [_call_custom_advantage(group, custom_advantage, options) for group in scored]
    elif options.combine == "total":
        rows = normalize_rewards([group.totals for group in scored], options)
    else:
        rows = _normalize_per_term(scored, options, weights)
    if options.batch_normalize:
        rows = batch_normalize(rows, options.eps)
    if options.outlier_std is not None:
        rows = zero_outliers(rows, options.outlier_std)
    if options.difficulty_weight is not None:
        rows = _apply_difficulty_weight(rows, scored, options.difficulty_weight)

    # Groups without scores took no part in the statistics above; they get an empty row at their place.
    scored_indices = [index for index, group in enumerate(groups) if group.scores]
    rows_by_index = dict(zip(scored_indices, rows, strict=True))
    return [rows_by_index.get(index, ()) for index in range(len(groups))]


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Return True unless all rewards are equal, which would leave nothing to learn from."""
    return max(rewards) - min(rewards) > EQUALITY_TOLERANCE


def normalize_rewards(rows: RewardRows, options: AdvantageConfig) -> list[tuple[float, ...]]:
    """Return A_i = (R_i - baseline) / scale for each rollout.

    Baselines: `group_mean` is GRPO's (DeepSeekMath, arXiv:2402.03300 v3, 4.1.2). `leave_one_out`, the mean of the other
    rollouts, is RLOO's (arXiv:2402.14740, eq. 6); it gives G / (G - 1) times the A of `group_mean`. `batch_mean`, over
    the step, is REINFORCE++'s (arXiv:2501.03262). Scales: `group_std` is GRPO's. Its paper does not name the deviation;
    here it is the sample deviation (divisor G - 1) plus `eps`, as torch.std in TRL and its relatives. `none` is
    Dr.GRPO's (arXiv:2503.20783, 3.2). `batch_std`, over the step, is Lite PPO's (arXiv:2508.08221).
    """
    step_rewards = list(chain.from_iterable(rows))
    uses_group = options.baseline in ("group_mean", "leave_one_out") or options.scale == "group_std"
    uses_step = options.baseline == "batch_mean" or options.scale == "batch_std"
    advantages: list[tuple[float, ...]] = []
    for row in rows:
        # Equal rewards give exactly 0; the formula below would leave a rounding error.
        if (uses_group or uses_step) and not rewards_differ(row if uses_group else step_rewards):
            advantages.append((0.0,) * len(row))
            continue
        width = 1.0
        if options.scale != "none":
            width = _sample_std(row if options.scale == "group_std" else step_rewards) + options.eps
        match options.baseline:
            case "group_mean":
                baselines = [fmean(row)] * len(row)
            case "leave_one_out":
                # The mean of the others, without a sum for each rollout.
                total = fsum(row)
                baselines = [(total - reward) / (len(row) - 1) for reward in row]
            case "batch_mean":
                baselines = [fmean(step_rewards)] * len(row)
            case "none":
                baselines = [0.0] * len(row)
        advantages.append(tuple((reward - baseline) / width for reward, baseline in zip(row, baselines, strict=True)))
    return advantages


def batch_normalize(rows: RewardRows, eps: float) -> list[tuple[float, ...]]:
    """Return (A_i - mean(A)) / (std(A) + eps), with mean and sample deviation over the whole step.

    Source: REINFORCE++ (arXiv:2501.03262, eq. 10), and the last step of GDPO (arXiv:2601.05242). Departure: a rollout
    counts once, however many tokens it has.
    """
    advantages = list(chain.from_iterable(rows))
    if not rewards_differ(advantages):
        return [(0.0,) * len(row) for row in rows]
    mean = fmean(advantages)
    # A mean that is 0 except for rounding is not subtracted: advantages of exactly 0 must stay so.
    shift = mean if abs(mean) > EQUALITY_TOLERANCE else 0.0
    width = _sample_std(advantages) + eps
    normalized: list[tuple[float, ...]] = []
    for row in rows:
        normalized.append(tuple((value - shift) / width for value in row))
    return normalized


def zero_outliers(rows: RewardRows, max_std: float) -> list[tuple[float, ...]]:
    """Return the advantages, with 0 for each that is more than `max_std` sample deviations from the step's mean.

    Source: the advantage filter of StableReinforce (R1-Reward, arXiv:2505.02835, 4.1). As in the paper, it compares the
    z-score; the code compares the advantage itself.
    """
    advantages = list(chain.from_iterable(rows))
    if not rewards_differ(advantages):
        return list(map(tuple, rows))
    mean = fmean(advantages)
    limit = max_std * _sample_std(advantages)
    kept: list[tuple[float, ...]] = []
    for row in rows:
        kept.append(tuple(value if abs(value - mean) <= limit else 0.0 for value in row))
    return kept


def _call_custom_advantage(
    group: Group, custom_advantage: CustomAdvantage, options: AdvantageConfig
) -> tuple[float, ...]:
    # All rollouts of a group answer one sample, so the same reward terms apply to each.
    terms = {name: _term_values(group, name) for name in group.scores[0].terms}
    returned = custom_advantage(list(group.totals), terms)
    sample_id = group.prompt.sample.id
    try:
        row = tuple(map(float, returned))
    except (TypeError, ValueError):
        raise UserError(
            f"advantage.fn {options.fn!r}: sample {sample_id}: it returned {returned!r:.80}, not a list of numbers"
        ) from None
    if len(row) != len(group.scores):
        raise UserError(
            f"advantage.fn {options.fn!r}: sample {sample_id}: it returned {len(row)} advantages for a group of "
            f"{len(group.scores)} rollouts"
        )
    if not all(map(isfinite, row)):
        raise UserError(f"advantage.fn {options.fn!r}: sample {sample_id}: an advantage is not finite: {list(row)}")
    return row


def _normalize_per_term(
    groups: Sequence[Group], options: AdvantageConfig, weights: Mapping[str, float]
) -> list[tuple[float, ...]]:
    """Normalize every reward term by itself, and return the weighted sum of the results.

    Source: GDPO (arXiv:2601.05242).
    """
    sums = [[0.0] * len(group.scores) for group in groups]
    # A dict keeps the terms in order. A set's order, and so the rounding of the sums, would differ between processes.
    names: dict[str, None] = {}
    for group in groups:
        names |= dict.fromkeys(group.scores[0].terms)
    for name in names:
        # A term may apply to only some groups. Its statistics over the step come from those groups.
        having: list[int] = []
        term_rows: list[list[float]] = []
        for index, group in enumerate(groups):
            if name in group.scores[0].terms:
                having.append(index)
                term_rows.append(_term_values(group, name))
        for index, row in zip(having, normalize_rewards(term_rows, options), strict=True):
            for rollout_index, value in enumerate(row):
                sums[index][rollout_index] += weights[name] * value
    return list(map(tuple, sums))


def _apply_difficulty_weight(
    rows: RewardRows, groups: Sequence[Group], options: DifficultyWeightConfig
) -> list[tuple[float, ...]]:
    """Multiply the advantages of each group by w f(p), with p its pass rate and w the weight at p = 1/2.

    Source: Observe-R1 (arXiv:2505.12432), dynamic weighting, f = 4 p (1 - p), there with w = 1.8; VL-Cogito
    (arXiv:2507.22607), online difficulty soft weighting, the three other curves. A group to which the term does not
    apply keeps its advantages.
    """
    weighted = []
    for row, group in zip(rows, groups, strict=True):
        weight = 1.0
        if options.term in group.scores[0].terms:
            pass_rate = fmean(_term_values(group, options.term))
            weight = options.max_weight * _difficulty_factor(options.curve, pass_rate)
        weighted.append(tuple(weight * value for value in row))
    return weighted


def _difficulty_factor(curve: str, pass_rate: float) -> float:
    """Return f(p) of `advantage.difficulty_weight.curve`, from 0 to 1."""
    if curve == "uncertain":
        return 4.0 * pass_rate * (1.0 - pass_rate)
    if curve == "hard" and pass_rate == 0.0:
        return 0.25
    if (curve == "hard" and pass_rate <= 0.5) or (curve == "easy" and pass_rate > 0.5):
        return 1.0
    # sin(pi p) = sin(pi (1 - p)). The smaller argument gives exactly 0 at p = 1, where sin(pi) would be 1e-16.
    return sin(pi * min(pass_rate, 1.0 - pass_rate))


def _term_values(group: Group, name: str) -> list[float]:
    return [score.terms[name].value for score in group.scores]


def _sample_std(values: Sequence[float]) -> float:
    """Return the sample standard deviation, divisor n - 1, of two values or more."""
    # Not statistics.stdev, which works in exact fractions: too slow for every group of every step.
    mean = fmean(values)
    return sqrt(fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
