"""Phases of a curriculum: which one a data position falls in, and when training ends one early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from statistics import fmean
from typing import NamedTuple

from mmrl.algo.reward_history import has_plateaued
from mmrl.config.schema import CurriculumPhaseConfig
from mmrl.types import TrainingState


class PhaseSpan(NamedTuple):
    """Data positions that one phase covers, from `start` up to `end`."""

    phase_index: int
    """Index of the phase in `data_order.phases`, from 0."""
    start: int
    """First data position of the phase."""
    end: float
    """First data position after the phase; infinite for the last one and for one that only a plateau ends."""


def find_phase(position: int, phases: Sequence[CurriculumPhaseConfig], ends: Mapping[int, int]) -> PhaseSpan:
    """Return the phase that a data position falls in. `ends` has the ends that a plateau settled, by phase index."""
    start = 0
    for index, phase in enumerate(phases[:-1]):
        planned_end = inf if phase.max_samples is None else start + phase.max_samples
        end = ends.get(index, planned_end)
        if position < end:
            return PhaseSpan(index, start, end)
        start = int(end)
    return PhaseSpan(len(phases) - 1, start, inf)


def advance_phase(state: TrainingState, sample_means: Sequence[float], phases: Sequence[CurriculumPhaseConfig]) -> int:
    """Add a step's rewards to the current phase, end it if they stopped rising, and return the phase that goes on.

    Args:
        state: `phase`, `phase_rewards` and `phase_ends` are updated.
        sample_means: mean reward of each sample that the step drew and scored.
        phases: phases of the stage's curriculum, at least one.
    """
    index = find_phase(state.data_position, phases, state.phase_ends).phase_index
    if index != state.phase:
        # The phase ended by its number of samples; this step's rewards still belong to the phase before.
        state.phase, state.phase_rewards = index, []
        return index
    if sample_means:
        state.phase_rewards += [fmean(sample_means)]
    plateau = phases[index].plateau
    if plateau is not None and has_plateaued(state.phase_rewards, plateau.window, plateau.min_improvement):
        state.phase_ends[index] = state.data_position
        state.phase, state.phase_rewards = index + 1, []
    return state.phase
