"""Orders that change as training goes on: phases, and priority to what is worth most. They read the run's State."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, log
from statistics import fmean

from mmrl.algo.seeds import derive
from mmrl.config.schema import Phase, Priority
from mmrl.data.history import note, stalled
from mmrl.data.order import Order, Row
from mmrl.ports import Chooser
from mmrl.types import Choice, Group, Sample, State, Visit


class Phased:
    """One order after another: each begins where the one before it ended, by the number of samples or earlier."""

    def __init__(self, orders: Sequence[Order], phases: Sequence[Phase], state: State) -> None:
        self._orders, self._phases, self._state = orders, phases, state

    def take(self, cursor: int, count: int) -> list[Row]:
        """The `count` rows that follow position `cursor`."""
        taken: list[Row] = []
        while len(taken) < count:
            position = cursor + len(taken)
            number, start, end = phase_at(position, self._phases, self._state.phase_ends)
            taken += self._orders[number].take(position - start, int(min(count - len(taken), end - position)))
        return taken


def phase_at(position: int, phases: Sequence[Phase], ends: Mapping[int, int]) -> tuple[int, int, float]:
    """Number, start and end of the phase that a position is in; `ends` are those that training has settled."""
    start = 0
    for number, phase in enumerate(phases[:-1]):
        end = ends.get(number, inf if phase.samples is None else start + phase.samples)
        if position < end:
            return number, start, end
        start = int(end)
    return len(phases) - 1, start, inf


class Prioritised:
    """Every step draws without replacement, in proportion to weights that follow from each sample's last visit.

    Weighted sampling by exponential clocks (Efraimidis and Spirakis, 2006): the sample with the least E / w comes
    first, E drawn from the standard exponential distribution, seeded by the position where the step begins.
    """

    def __init__(self, samples: Sequence[Sample], options: Priority, state: State, seed: int) -> None:
        self._samples, self._options, self._state, self._seed = samples, options, state, seed

    def take(self, cursor: int, count: int) -> list[Row]:
        """The `count` samples that follow position `cursor` of this step; drawn twice only once all were drawn."""
        start = cursor - self._state.step_start
        rng = random.Random(derive(self._seed, "priority", self._state.step_start))
        clocks = [(-log(1.0 - rng.random()) / self._weight(sample), k) for k, sample in enumerate(self._samples)]
        first = heapq.nsmallest(start + count, clocks)
        return [self._samples[first[place % len(first)][1]] for place in range(start, start + count)]

    def _weight(self, sample: Sample) -> float:
        visits = self._state.history.get(sample.id)
        return 1.0 if not visits else max(self._options.floor, worth(visits[-1], self._options))


def worth(visit: Visit, options: Priority) -> float:
    """What a sample is worth that fared so: 4 p (1 - p), or 1 - p."""
    p = visit.mean
    return 4.0 * p * (1.0 - p) if options.by == "uncertainty" else 1.0 - p


class Attentive:
    """A chooser that notes how samples fared, for orders that go by it, and when a phase is over."""

    def __init__(self, chooser: Chooser, terms: Sequence[str], phases: Sequence[Phase] = ()) -> None:
        self._chooser, self._terms, self._phases = chooser, terms, phases

    def wants_more(self, groups: Sequence[Group], state: State, *, rounds: int) -> bool:
        """As the chooser inside says."""
        return self._chooser.wants_more(groups, state, rounds=rounds)

    def choose(self, groups: Sequence[Group], state: State) -> Choice:
        """As the chooser inside does."""
        means = note(state.history, groups, self._terms)
        state.step_start = state.cursor
        choice = self._chooser.choose(groups, state)
        if not self._phases:
            return choice
        number = self._pace(means, state)
        return replace(choice, metrics={**choice.metrics, "data/phase": float(number)})

    def _pace(self, means: Sequence[float], state: State) -> int:
        """Settle the end of the phase, if its reward stopped rising; returns the number of the one that goes on."""
        number, _, _ = phase_at(state.cursor, self._phases, state.phase_ends)
        if number != state.phase:  # ended by the number of samples
            state.phase, state.phase_rewards = number, []
            return number
        state.phase_rewards += [fmean(means)] if means else []
        plateau = self._phases[number].plateau
        if plateau is not None and stalled(state.phase_rewards, plateau.window, plateau.rise):
            state.phase_ends[number] = state.cursor
            state.phase, state.phase_rewards = number + 1, []
        return state.phase
