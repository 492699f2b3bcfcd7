"""Selection: from the scored groups of a step to the experiences that the learner trains on.

`SelectionPipeline.select` is the whole of it, from top to bottom: record rewards, filter groups, compute advantages,
mark staleness, replay, advance the curriculum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum
from typing import NamedTuple

from mmrl.algo.advantages import EQUALITY_TOLERANCE
from mmrl.algo.changed_media import ChangedMediaDetector
from mmrl.algo.curriculum_phase import advance_phase
from mmrl.algo.replay import ReplaySettings, replay_experiences
from mmrl.algo.reward_history import record_rewards
from mmrl.algo.staleness import OldLogprobs, staleness_metrics, with_staleness
from mmrl.config.schema import CurriculumPhaseConfig, DynamicSamplingConfig, GroupRewardRangeConfig
from mmrl.types import Experience, FinishReason, Group, SelectedExperiences, TrainingState

AdvantageFunction = Callable[[Sequence[Group]], Sequence[Sequence[float]]]
"""Returns one advantage for each rollout of each group."""

TRUNCATED, UNSCORED = "truncated", "unscored"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionPipeline:
    """Decides what each step of an RL stage trains on; implements `ports.ExperienceSelector`."""

    compute_advantages: AdvantageFunction
    """Computes the advantages of all groups that passed the filter at once: some formulas compare the whole step."""
    prompts_per_step: int = 0
    """Groups that a step trains on at most; read only with `dynamic_sampling`."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Which groups pass. None trains on all groups of a single round."""
    replay: ReplaySettings | None = None
    """How rollouts of earlier steps are trained on again; None for never."""
    changed_media: ChangedMediaDetector
    """Finds rollouts of earlier steps that cannot be used because their media changed."""
    stale_old_logprobs: OldLogprobs | None = "recorded"
    """Whose log-probs the ratio uses for a stale rollout that is not replayed; None for what `loss.old_logprobs` says.

    `_LossTokens` in `mmrl/learner/objective.py` lists all settings that decide.
    """
    rollouts_may_be_stale: bool = False
    """True with async or partial rollouts, whose staleness is logged."""
    tracked_terms: tuple[str, ...] = ()
    """Reward terms whose mean is recorded for each sample; none records nothing."""
    curriculum_phases: tuple[CurriculumPhaseConfig, ...] = ()
    """Phases of the stage's curriculum; empty without one, or without `tracked_terms`."""

    def needs_another_round(self, groups: Sequence[Group], state: TrainingState, *, rounds: int) -> bool:
        """Return True while another sampling round is needed.

        The first round always is. With dynamic sampling, so is any other while fewer than `prompts_per_step` groups
        have passed, those carried over included, and rounds are left.
        """
        if self.dynamic_sampling is None or rounds == 0:
            return rounds == 0
        num_passed = len(state.carried_over)
        for group in groups:
            if rejection_reason(group, self.dynamic_sampling) is None:
                num_passed += 1
        return rounds < self.dynamic_sampling.max_rounds and num_passed < self.prompts_per_step

    def select(self, groups: Sequence[Group], state: TrainingState) -> SelectedExperiences:
        """Return what the step trains on, and update what the state keeps of the groups.

        Raises:
            ValueError: an advantage is not finite, and `replay` would keep it.
        """
        sample_means: Sequence[float] = ()
        if self.tracked_terms:
            sample_means = record_rewards(state.reward_history, groups, self.tracked_terms)
            # An order by priority draws the whole next step with the weights known now, from this position on.
            state.step_data_start = state.data_position

        filtered = self._filter_groups(groups, state)
        passed = [groups[index] for index in filtered.passed]
        advantages = list(map(tuple, self.compute_advantages([*filtered.carried, *passed])))
        num_carried = len(filtered.carried)
        # Groups carried over were sampled by an older policy in any case, so their ratio uses what was recorded then.
        experiences = [
            *_make_experiences(filtered.carried, advantages[:num_carried], state.version, "recorded"),
            *_make_experiences(passed, advantages[num_carried:], state.version, self.stale_old_logprobs),
        ]
        metrics = staleness_metrics(experiences) if self.rollouts_may_be_stale else {}
        metrics |= filtered.metrics

        if self.replay is not None:
            trained, replay_metrics = replay_experiences(experiences, state, self.replay, self.changed_media)
            metrics |= replay_metrics
        else:
            trained = tuple(experiences)
        # After the selection: the phase that this step's samples came from is still the current one until here.
        if self.curriculum_phases:
            metrics["data/curriculum_phase"] = float(advance_phase(state, sample_means, self.curriculum_phases))

        # Rollout files and metrics show all groups of the step; those that were filtered out have no advantage.
        shown = [(0.0,) * len(group.rollouts) for group in groups]
        for index, row in zip(filtered.passed, advantages[num_carried:], strict=True):
            shown[index] = row
        return SelectedExperiences(groups=tuple(groups), advantages=tuple(shown), experiences=trained, metrics=metrics)

    def _filter_groups(self, groups: Sequence[Group], state: TrainingState) -> FilteredGroups:
        """Choose the groups to train on: those carried over first, then as many that pass as there is room for.

        What passes beyond that is carried over to the next step, or dropped, as `dynamic_sampling.extra` says.
        """
        options = self.dynamic_sampling
        if options is None:
            return FilteredGroups(carried=[], passed=list(range(len(groups))), metrics={})
        # Images may have been overwritten since the step that sampled these groups.
        changed = self.changed_media.find_changed_digests(group.prompt for group in state.carried_over)
        carried = [group for group in state.carried_over if group.prompt.digest not in changed]

        passed: list[int] = []
        rejected: Counter[str] = Counter()
        for index, group in enumerate(groups):
            reason = rejection_reason(group, options)
            if reason is None:
                passed.append(index)
            else:
                rejected[reason] += 1
        room = self.prompts_per_step - len(carried)
        extra = [groups[index] for index in passed[room:]]
        state.carried_over = tuple(extra) if options.extra == "carry" else ()

        metrics = {
            "dynamic_sampling/passed_frac": len(passed) / len(groups) if groups else 0.0,
            "dynamic_sampling/carried_over": float(len(carried)),
        }
        for reason, count in rejected.items():
            metrics[f"dynamic_sampling/rejected/{reason}"] = float(count)
        return FilteredGroups(carried=carried, passed=passed[:room], metrics=metrics)


class FilteredGroups(NamedTuple):
    """Groups that a step trains on, carried over and its own."""

    carried: list[Group]
    """Groups that passed in an earlier step, which had no room for them."""
    passed: list[int]
    """Indices of this step's groups that are trained on now."""
    metrics: dict[str, float]
    """`dynamic_sampling/*`; empty without a filter."""


def rejection_reason(group: Group, options: DynamicSamplingConfig) -> str | None:
    """Return why a group is not trained on: `unscored`, `truncated` or the name of a term; None if it passes.

    Sources: DAPO (arXiv:2503.14476, eq. 11) leaves out groups that are all correct or all incorrect; MM-EUREKA
    (arXiv:2503.07365) those whose mean accuracy is outside [0.1, 0.9].
    """
    if not group.rollouts:
        return UNSCORED
    num_truncated = sum(rollout.finish_reason is FinishReason.LENGTH for rollout in group.rollouts)
    if num_truncated / len(group.rollouts) > options.max_truncated_frac:
        return TRUNCATED
    for reward_range in options.ranges:
        if not _in_range(group, reward_range):
            return reward_range.term
    return None


def _in_range(group: Group, reward_range: GroupRewardRangeConfig) -> bool:
    """Return True if the term's mean over the group is in range, or the term does not apply to the group."""
    values = []
    for score in group.scores:
        if reward_range.term in score.terms:
            values.append(score.terms[reward_range.term].value)
    if not values:
        return True
    if reward_range.require_mixed and max(values) - min(values) <= EQUALITY_TOLERANCE:
        return False
    mean = fsum(values) / len(values)
    return reward_range.low - EQUALITY_TOLERANCE <= mean <= reward_range.high + EQUALITY_TOLERANCE


def _make_experiences(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]], version: int, old_logprobs: OldLogprobs | None
) -> list[Experience]:
    """Pair every rollout with its advantage, and mark those that policy `version` did not sample itself."""
    experiences = []
    for group, row in zip(groups, advantages, strict=True):
        for rollout, advantage in zip(group.rollouts, row, strict=True):
            fresh = Experience(rollout=rollout, advantage=advantage)
            experiences.append(with_staleness(fresh, version, old_logprobs))
    return experiences
