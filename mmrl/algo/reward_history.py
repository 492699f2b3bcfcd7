"""Rewards of each sample over the steps that drew it, and two uses of them.

Later `select` stages rank samples by them, and a curriculum ends a phase early when they stop rising.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from itertools import zip_longest
from operator import attrgetter
from statistics import fmean, pstdev

from mmrl.config.schema import CurriculumPhaseConfig
from mmrl.config.schema.data import find_phase
from mmrl.types import Group, SampleStats, TrainingState

RewardHistory = Mapping[str, Sequence[SampleStats]]
"""Sample id → statistics of its group at each visit, oldest first. A visit is a step that drew the sample."""


def record_rewards(
    history: MutableMapping[str, list[SampleStats]], groups: Sequence[Group], terms: Sequence[str]
) -> list[float]:
    """Append the statistics of each group to the history of its sample, and return the means that were added.

    The reward of a rollout is the mean over the `terms` that apply to it. A group adds nothing when it has no scored
    rollout or none of `terms` applies to it.
    """
    means = []
    for group in groups:
        rewards = []
        for score in group.scores:
            applicable = [score.terms[name].value for name in terms if name in score.terms]
            if applicable:
                rewards.append(fmean(applicable))
        if rewards:
            stats = SampleStats(mean=fmean(rewards), std=pstdev(rewards))
            history.setdefault(group.prompt.sample.id, []).append(stats)
            means.append(stats.mean)
    return means


def measure_samples(history: RewardHistory, metric: str) -> dict[str, float]:
    """Return one value for each sample, from its mean reward r_ik at its k-th visit.

    reward_mean: the mean over visits. reward_std: the standard deviation, by which one-example RLVR ranks samples
    (arXiv:2504.20571, 2.2). limr: 1 - sum_k (r_ik - m_k)^2 / sum_k (1 - m_k)^2, at most 1, with m_k the mean over all
    samples that have a k-th visit; 0 where every m_k is 1 (LIMR, arXiv:2502.11886, eq. 2).

    Raises:
        ValueError: `metric` is none of these.
    """
    curves = {sample_id: list(map(attrgetter("mean"), visits)) for sample_id, visits in history.items()}
    match metric:
        case "reward_mean":
            return {sample_id: fmean(curve) for sample_id, curve in curves.items()}
        case "reward_std":
            return {sample_id: pstdev(curve) for sample_id, curve in curves.items()}
        case "limr":
            return _align_with_mean_curve(curves)
        case _:
            raise ValueError(f"rewards over the steps of a stage give no {metric!r}")


def _align_with_mean_curve(curves: Mapping[str, Sequence[float]]) -> dict[str, float]:
    mean_curve = []
    for visits in zip_longest(*curves.values()):
        # `zip_longest` gives None for samples that were drawn less often.
        mean_curve.append(fmean(reward for reward in visits if reward is not None))
    values = {}
    for sample_id, curve in curves.items():
        distance, largest = 0.0, 0.0
        # A sample drawn less often has a shorter curve than the mean, and is compared over its own length.
        for reward, mean in zip(curve, mean_curve, strict=False):
            distance += (reward - mean) ** 2
            largest += (1.0 - mean) ** 2
        values[sample_id] = 1.0 - distance / largest if largest else 0.0
    return values


def advance_phase(state: TrainingState, sample_means: Sequence[float], phases: Sequence[CurriculumPhaseConfig]) -> None:
    """Add a step's rewards to the current phase, and set `state.phase` to the phase of the next step.

    `sample_means` has the mean reward of each sample that the step drew and scored; `phases` has at least one.
    """
    index = find_phase(state.data_position, phases, state.phase_ends).phase_index
    if index != state.phase:
        # The phase ended by its number of samples; this step's rewards still belong to the phase before.
        state.phase, state.phase_rewards = index, []
        return
    if sample_means:
        state.phase_rewards += [fmean(sample_means)]
    plateau = phases[index].plateau
    if plateau is not None and has_plateaued(state.phase_rewards, plateau.window, plateau.min_improvement):
        # The position is kept, so that a resumed run draws the same samples from here on.
        state.phase_ends[index] = state.data_position
        state.phase, state.phase_rewards = index + 1, []


def has_plateaued(rewards: Sequence[float], window: int, min_rise: float) -> bool:
    """Return True when the mean of the last `window` rewards has risen by less than `min_rise` since the window before.

    False until there are two full windows.
    """
    if len(rewards) < 2 * window:
        return False
    return fmean(rewards[-window:]) - fmean(rewards[-2 * window : -window]) < min_rise
