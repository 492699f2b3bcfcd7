"""What the policy of one version drew and that of a later one learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from mmrl.algo.replay import age
from mmrl.ports import Chooser
from mmrl.types import Choice, Experience, Group, State


class Lagging:
    """A chooser whose experiences know how old they are, so that nobody takes them for the policy's own.

    Below their ratio stand the probabilities of when they were drawn: pi / pi_drawn, clipped. With `corrected` the
    learner's stand there, and what importance weights correct for is the step between as well: the decoupled objective
    of Hilton et al., arXiv:2110.00641, which AReaL uses (arXiv:2505.24298).
    """

    def __init__(self, inner: Chooser, *, corrected: bool) -> None:
        self._inner, self._corrected = inner, corrected

    def wants_more(self, groups: Sequence[Group], state: State, *, rounds: int) -> bool:
        """As the inner chooser."""
        return self._inner.wants_more(groups, state, rounds=rounds)

    def choose(self, groups: Sequence[Group], state: State) -> Choice:
        """As the inner chooser, with the age of each experience, and its mean and maximum."""
        choice = self._inner.choose(groups, state)
        aged = [self._aged(experience, state.version) for experience in choice.experiences]
        ages = [experience.age for experience in aged]
        metrics: dict[str, float] = {}
        if ages:
            metrics = {"rollout/version_gap_mean": fmean(ages), "rollout/version_gap_max": float(max(ages))}
        return replace(choice, experiences=tuple(aged), metrics={**choice.metrics, **metrics})

    def _aged(self, experience: Experience, version: int) -> Experience:
        passed = age(experience.rollout, version)
        if not passed:
            return experience
        return replace(experience, age=passed, old=None if self._corrected else "sampler")
