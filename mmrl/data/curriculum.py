"""Orders that change as training goes on: phases, and priority to what is worth most. They read the run's State."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from math import log

from mmrl.algo.curriculum_phase import find_phase
from mmrl.algo.seeds import derive_seed
from mmrl.config.schema import CurriculumPhaseConfig, PriorityOrderConfig
from mmrl.data.order import DataOrder, DataRow
from mmrl.types import Sample, SampleStats, TrainingState


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
            number, start, end = find_phase(position, self._phases, self._state.phase_ends)
            taken += self._orders[number].take(position - start, int(min(count - len(taken), end - position)))
        return taken


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
