"""Orders that follow the rewards of training: phases of a curriculum, and priority to samples worth most."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from math import log

from mmrl.algo.reward_history import find_phase
from mmrl.config.schema import CurriculumPhaseConfig, PriorityOrderConfig
from mmrl.data.order import DataOrder, DataRow
from mmrl.types import Sample, SampleStats, TrainingState
from mmrl.utils.seeds import derive_seed


class CurriculumOrder:
    """Takes from one order after another. A phase ends by its number of samples, or when its reward plateaus."""

    def __init__(
        self, orders: Sequence[DataOrder], phases: Sequence[CurriculumPhaseConfig], state: TrainingState
    ) -> None:
        """Create an order.

        Args:
            orders: one for each phase.
            phases: limits of the phases.
            state: `phase_ends` is read at every take, since selection settles ends while training goes on.
        """
        self._orders, self._phases, self._state = orders, phases, state

    def take(self, start_position: int, count: int) -> list[DataRow]:
        """Return the `count` rows from `start_position` on."""
        taken: list[DataRow] = []
        while len(taken) < count:
            position = start_position + len(taken)
            phase_index, start, end = find_phase(position, self._phases, self._state.phase_ends)
            wanted = int(min(count - len(taken), end - position))
            taken += self._orders[phase_index].take(position - start, wanted)
        return taken


class PriorityOrder:
    """Samples every step without replacement, with weights that follow from each sample's last reward.

    Source: weighted sampling by exponential clocks (Efraimidis and Spirakis, 2006). The sample with the smallest E / w
    comes first, E from the standard exponential distribution.
    """

    def __init__(
        self, samples: Sequence[Sample], options: PriorityOrderConfig, state: TrainingState, seed: int
    ) -> None:
        """Create an order.

        Args:
            samples: at least one.
            options: how a weight follows from a reward.
            state: rewards of earlier visits, and the position where the step begins.
            seed: of all steps.
        """
        self._samples, self._options, self._state, self._seed = samples, options, state, seed

    def take(self, start_position: int, count: int) -> list[DataRow]:
        """Return the `count` samples from `start_position` on, which must not lie before the step's start.

        No sample comes twice in a step before all have come once.
        """
        # Every take of a step draws the same clocks again, from the step's start, and skips what earlier takes got.
        step_start = self._state.step_data_start
        rng = random.Random(derive_seed(self._seed, "priority", step_start))
        clocks = []
        for index, sample in enumerate(self._samples):
            clocks.append((-log(1.0 - rng.random()) / self._weight(sample), index))
        offset = start_position - step_start
        first = heapq.nsmallest(offset + count, clocks)
        taken: list[DataRow] = []
        for rank in range(offset, offset + count):
            _, index = first[rank % len(first)]
            taken.append(self._samples[index])
        return taken

    def _weight(self, sample: Sample) -> float:
        """Return the weight of a sample; 1 for one that has not been visited."""
        visits = self._state.reward_history.get(sample.id)
        if not visits:
            return 1.0
        return max(self._options.min_weight, priority_of(visits[-1], self._options))


def priority_of(stats: SampleStats, options: PriorityOrderConfig) -> float:
    """Return the priority of a sample with mean reward p: 4 p (1 - p) by uncertainty, else 1 - p."""
    if options.weight_by == "uncertainty":
        return 4.0 * stats.mean * (1.0 - stats.mean)
    return 1.0 - stats.mean
