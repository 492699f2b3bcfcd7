"""Orders that change as training goes on: phases, and priority to what is worth most. They read the run's State."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, log
from statistics import fmean

from mmrl.algo.seeds import derive_seed
from mmrl.config.schema import CurriculumPhaseConfig, PriorityOrderConfig
from mmrl.data.history import has_plateaued, record_rewards
from mmrl.data.order import DataOrder, DataRow
from mmrl.ports import ExperienceSelector
from mmrl.types import Group, Sample, SampleStats, SelectedExperiences, TrainingState


class CurriculumOrder:
    """One order after another: each begins where the one before it ended, by the number of samples or earlier."""

    def __init__(
        self, orders: Sequence[DataOrder], phases: Sequence[CurriculumPhaseConfig], state: TrainingState
    ) -> None:
        self._orders, self._phases, self._state = orders, phases, state

    def take(self, start_position: int, count: int) -> list[DataRow]:
        """The `count` rows that follow position `cursor`."""
        taken: list[DataRow] = []
        while len(taken) < count:
            position = start_position + len(taken)
            number, start, end = phase_at(position, self._phases, self._state.phase_ends)
            taken += self._orders[number].take(position - start, int(min(count - len(taken), end - position)))
        return taken


def phase_at(position: int, phases: Sequence[CurriculumPhaseConfig], ends: Mapping[int, int]) -> tuple[int, int, float]:
    """Number, start and end of the phase that a position is in; `ends` are those that training has settled."""
    start = 0
    for number, phase in enumerate(phases[:-1]):
        end = ends.get(number, inf if phase.max_samples is None else start + phase.max_samples)
        if position < end:
            return number, start, end
        start = int(end)
    return len(phases) - 1, start, inf


class PriorityOrder:
    """Every step draws without replacement, in proportion to weights that follow from each sample's last visit.

    Weighted sampling by exponential clocks (Efraimidis and Spirakis, 2006): the sample with the least E / w comes
    first, E drawn from the standard exponential distribution, seeded by the position where the step begins.
    """

    def __init__(
        self, samples: Sequence[Sample], options: PriorityOrderConfig, state: TrainingState, seed: int
    ) -> None:
        self._samples, self._options, self._state, self._seed = samples, options, state, seed

    def take(self, start_position: int, count: int) -> list[DataRow]:
        """The `count` samples that follow position `cursor` of this step; drawn twice only once all were drawn."""
        start = start_position - self._state.step_data_start
        rng = random.Random(derive_seed(self._seed, "priority", self._state.step_data_start))
        clocks = [(-log(1.0 - rng.random()) / self._weight(sample), k) for k, sample in enumerate(self._samples)]
        first = heapq.nsmallest(start + count, clocks)
        return [self._samples[first[place % len(first)][1]] for place in range(start, start + count)]

    def _weight(self, sample: Sample) -> float:
        visits = self._state.reward_history.get(sample.id)
        return 1.0 if not visits else max(self._options.min_weight, priority_of(visits[-1], self._options))


def priority_of(stats: SampleStats, options: PriorityOrderConfig) -> float:
    """What a sample is worth that fared so: 4 p (1 - p), or 1 - p."""
    p = stats.mean
    return 4.0 * p * (1.0 - p) if options.weight_by == "uncertainty" else 1.0 - p


class Attentive:
    """A chooser that notes how samples fared, for orders that go by it, and when a phase is over."""

    def __init__(
        self, inner: ExperienceSelector, terms: Sequence[str], phases: Sequence[CurriculumPhaseConfig] = ()
    ) -> None:
        self._inner, self._terms, self._phases = inner, terms, phases

    def needs_another_round(self, groups: Sequence[Group], state: TrainingState, *, rounds: int) -> bool:
        """As the chooser inside says."""
        return self._inner.needs_another_round(groups, state, rounds=rounds)

    def select(self, groups: Sequence[Group], state: TrainingState) -> SelectedExperiences:
        """As the chooser inside does."""
        means = record_rewards(state.reward_history, groups, self._terms)
        state.step_data_start = state.data_position
        choice = self._inner.select(groups, state)
        if not self._phases:
            return choice
        number = self._advance_phase(means, state)
        return replace(choice, metrics={**choice.metrics, "data/curriculum_phase": float(number)})

    def _advance_phase(self, means: Sequence[float], state: TrainingState) -> int:
        """Settle the end of the phase, if its reward stopped rising; returns the number of the one that goes on."""
        number, _, _ = phase_at(state.data_position, self._phases, state.phase_ends)
        if number != state.phase:  # ended by the number of samples
            state.phase, state.phase_rewards = number, []
            return number
        state.phase_rewards += [fmean(means)] if means else []
        plateau = self._phases[number].plateau
        if plateau is not None and has_plateaued(state.phase_rewards, plateau.window, plateau.min_improvement):
            state.phase_ends[number] = state.data_position
            state.phase, state.phase_rewards = number + 1, []
        return state.phase
