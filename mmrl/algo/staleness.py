"""What the policy of one version drew and that of a later one learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from mmrl.algo.replay import compute_staleness
from mmrl.ports import ExperienceSelector
from mmrl.types import Experience, Group, SelectedExperiences, TrainingState


class Lagging:
    """A chooser whose experiences know how old they are, so that nobody takes them for the policy's own.

    Below their ratio stand the probabilities of when they were drawn: pi / pi_drawn, clipped. With `corrected` the
    learner's stand there, and what importance weights correct for is the step between as well: the decoupled objective
    of Hilton et al., arXiv:2110.00641, which AReaL uses (arXiv:2505.24298).
    """

    def __init__(self, inner: ExperienceSelector, *, corrected: bool) -> None:
        self._inner, self._corrected = inner, corrected

    def needs_another_round(self, groups: Sequence[Group], state: TrainingState, *, rounds: int) -> bool:
        """As the inner chooser."""
        return self._inner.needs_another_round(groups, state, rounds=rounds)

    def select(self, groups: Sequence[Group], state: TrainingState) -> SelectedExperiences:
        """As the inner chooser, with the age of each experience, and its mean and maximum."""
        choice = self._inner.select(groups, state)
        aged = [self._with_staleness(experience, state.version) for experience in choice.experiences]
        ages = [experience.staleness for experience in aged]
        metrics: dict[str, float] = {}
        if ages:
            metrics = {"rollout/staleness_mean": fmean(ages), "rollout/staleness_max": float(max(ages))}
        return replace(choice, experiences=tuple(aged), metrics={**choice.metrics, **metrics})

    def _with_staleness(self, experience: Experience, version: int) -> Experience:
        passed = compute_staleness(experience.rollout, version)
        if not passed:
            return experience
        return replace(experience, staleness=passed, old_logprobs_source=None if self._corrected else "recorded")
