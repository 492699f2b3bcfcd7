"""Selection: from the scored groups of a step to the experiences that the learner trains on.

`ExperienceSelector.select` calls all parts, in this order: record rewards, filter groups, compute advantages,
mark staleness, replay, advance the curriculum.

Staleness is the age of a rollout's oldest token, in policy versions. A stale rollout is learned from off-policy: its
importance ratio is pi / pi_sampling, with the log-probs that were recorded while sampling. (`replay.old_logprobs` can
choose otherwise for replayed rollouts; groups carried over always use the recorded ones.) With
`loss.rollout_correction`, which needs `loss.old_logprobs: recomputed`, the ratio is that of the policy now to the
policy at the start of the step, and a separate weight corrects for the older policy that sampled: the decoupled
objective of Hilton et al. (arXiv:2110.00641), which AReaL uses (arXiv:2505.24298).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite
from statistics import fmean
from typing import Literal, NamedTuple

from mmrl.algo.advantages import EQUALITY_TOLERANCE
from mmrl.algo.replay import ChangedMediaFinder, ReplaySettings, replay_experiences
from mmrl.algo.reward_history import advance_phase, record_rewards
from mmrl.config.schema import CurriculumPhaseConfig, DynamicSamplingConfig, GroupRewardRangeConfig
from mmrl.types import Experience, FinishReason, Group, GroupSelection, SelectedExperiences, TrainingState

AdvantageFunction = Callable[[Sequence[Group]], Sequence[Sequence[float]]]
"""Returns one advantage for each rollout of each group."""

TurnAdvantageFunction = Callable[[Group, Sequence[float]], Sequence[tuple[float, ...]] | None]
"""Returns advantages of the turns of each rollout of a group, from those of the rollouts; None if turns share them."""

OldLogprobs = Literal["recorded", "recomputed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperienceSelector:
    """Decides what each step of an RL stage trains on; implements `protocols.Selector`."""

    # Called with all groups that passed the filter at once: some formulas compare the whole step.
    compute_advantages: AdvantageFunction
    compute_turn_advantages: TurnAdvantageFunction | None = None  # None: turns share their rollout's advantage
    prompts_per_step: int = 0  # groups that a step trains on at most; read with `dynamic_sampling` or `carry_over`
    dynamic_sampling: DynamicSamplingConfig | None = None  # which groups pass; None for all groups of a single round
    carry_over: bool = False  # groups that a step has no room for wait for the next one; otherwise they are dropped
    mask_truncated: bool = False  # responses that the length limit cut train nothing: `loss.mask_truncated`
    replay: ReplaySettings | None = None  # how rollouts of earlier steps are trained on again; None for never
    find_changed_media: ChangedMediaFinder  # finds rollouts of earlier steps that cannot be used any more
    # Denominator of a stale rollout's importance ratio. "recorded": always the recorded log-probs. None: those that
    # `loss.old_logprobs` says, as a rollout correction needs. Groups carried over always use the recorded ones.
    # `TokenTable.old_is_recorded_N` in mmrl/learner/tokens.py lists all settings that decide.
    stale_old_logprobs: OldLogprobs | None = "recorded"
    rollouts_may_be_stale: bool = False  # True with async or partial rollouts, whose staleness is logged
    tracked_terms: tuple[str, ...] = ()  # reward terms whose mean is recorded for each sample; none records nothing
    curriculum_phases: tuple[CurriculumPhaseConfig, ...] = ()  # empty without a curriculum, or without `tracked_terms`

    def recheck_carried_over(self, state: TrainingState) -> dict[str, float]:
        """Drop the groups carried over whose media have changed since they were sampled; return their number."""
        if not self.carry_over:
            return {}
        changed = self.find_changed_media(rollout for group in state.carried_over for rollout in group.rollouts)
        kept = []
        for group in state.carried_over:
            if changed.isdisjoint(rollout.media_digests for rollout in group.rollouts):
                kept.append(group)
        num_dropped = len(state.carried_over) - len(kept)
        state.carried_over = tuple(kept)
        return {"groups/dropped_changed_media": float(num_dropped)}

    def needs_another_round(self, groups: Sequence[Group], state: TrainingState, *, rounds: int) -> bool:
        """Return True while another sampling round is needed.

        The first round is needed unless the groups carried over fill the step: further groups would only become stale.
        Later rounds need dynamic sampling. They continue while fewer than `prompts_per_step` groups have passed, those
        carried over included, and rounds are left.
        """
        num_passed = len(state.carried_over)
        if rounds == 0:
            return not self.carry_over or num_passed < self.prompts_per_step
        if self.dynamic_sampling is None:
            return False
        for group in groups:
            if rejection_reason(group, self.dynamic_sampling) is None:
                num_passed += 1
        return rounds < self.dynamic_sampling.max_rounds and num_passed < self.prompts_per_step

    def select(self, groups: Sequence[Group], state: TrainingState) -> SelectedExperiences:
        """Return what the step trains on; update rewards, carried-over groups, replay and curriculum in `state`.

        Raises:
            ValueError: an advantage is not finite.
        """
        # The rewards of each sample, for later stages, the curriculum and resets of the reference.
        sample_means: Sequence[float] = ()
        if self.tracked_terms:
            sample_means = record_rewards(state.reward_history, groups, self.tracked_terms)
            if sample_means:
                state.reset_rewards.append(fmean(sample_means))
            # The next step starts here. An order by priority draws its samples by the rewards recorded so far.
            state.step_data_start = state.data_position

        # The groups to train on, and an experience with its advantage for each of their rollouts.
        filtered = self._filter_groups(groups, state)
        trained_groups = [*filtered.carried, *(groups[index] for index in filtered.passed)]
        all_advantages = self.compute_advantages(trained_groups)
        rows: list[tuple[Experience, ...]] = []
        for index, (group, advantages) in enumerate(zip(trained_groups, all_advantages, strict=True)):
            # Groups carried over always come from an older policy, so their ratio uses the recorded log-probs.
            stale_old_logprobs = "recorded" if index < len(filtered.carried) else self.stale_old_logprobs
            rows.append(self._make_experiences(group, advantages, state.version, stale_old_logprobs))
        experiences = tuple(chain.from_iterable(rows))
        metrics = dict(filtered.metrics)
        if self.rollouts_may_be_stale and experiences:
            ages = [experience.staleness for experience in experiences]
            metrics |= {"rollout/staleness_mean": fmean(ages), "rollout/staleness_max": float(max(ages))}

        # Replay. The learner leaves masked responses out, so they may neither fill the step nor be replayed later.
        unmasked = experiences
        if self.mask_truncated:
            unmasked = tuple(each for each in experiences if each.rollout.finish_reason is not FinishReason.LENGTH)
        fresh = experiences
        replayed: tuple[Experience, ...] = ()
        if self.replay is not None:
            fresh, replayed, replay_metrics = replay_experiences(unmasked, state, self.replay, self.find_changed_media)
            metrics |= replay_metrics

        # Last, because until here the current phase is the one that this step's samples came from.
        if self.curriculum_phases:
            metrics["data/curriculum_phase"] = float(advance_phase(state, sample_means, self.curriculum_phases))

        shown = show_groups(groups, filtered, rows)
        return SelectedExperiences(
            groups=tuple(group for group, _, _ in shown),
            scored=tuple(row for _, row, _ in shown),
            selections=tuple(selection for _, _, selection in shown),
            experiences=(*fresh, *replayed),
            replayed=replayed,
            # Replayed advantages would hide that a task is solved: without new signal a run would train on stale
            # rollouts alone.
            has_signal=any(experience.mean_abs_advantage for experience in unmasked),
            metrics=metrics,
        )

    def _make_experiences(
        self, group: Group, advantages: Sequence[float], version: int, stale_old_logprobs: OldLogprobs | None
    ) -> tuple[Experience, ...]:
        """Return an experience for each rollout, with its advantage, those of its turns, and its staleness.

        Raises:
            ValueError: an advantage is not finite, so it gives no gradient and no replay weight.
        """
        turn_rows: Sequence[tuple[float, ...] | None] | None = None
        if self.compute_turn_advantages is not None:
            turn_rows = self.compute_turn_advantages(group, advantages)
        turn_rows = turn_rows or [None] * len(advantages)
        experiences = []
        for rollout, advantage, turns in zip(group.rollouts, advantages, turn_rows, strict=True):
            if turns is not None:
                advantage = fmean(turns)  # noqa: PLW2901  # one number for the records of a rollout
            if not isfinite(advantage):
                owner = f"sample {rollout.prompt.sample.id}, rollout {rollout.index}"
                raise ValueError(f"{owner}: advantage {advantage} is not finite")
            staleness = version - rollout.oldest_version
            experience = Experience(
                rollout=rollout,
                advantage=advantage,
                turn_advantages=turns,
                staleness=staleness,
                # Only `loss.old_logprobs` decides about a fresh rollout.
                old_logprobs_source=stale_old_logprobs if staleness else None,
            )
            experiences.append(experience)
        return tuple(experiences)

    def _filter_groups(self, groups: Sequence[Group], state: TrainingState) -> FilteredGroups:
        """Choose the groups to train on: those carried over first, then as many that pass as there is room for.

        Groups beyond `prompts_per_step` wait for the next step or are dropped, as `carry_over` says.
        """
        if self.dynamic_sampling is None and not self.carry_over:
            return FilteredGroups(carried=[], passed=list(range(len(groups))), waiting=[], rejected={}, metrics={})
        passed: list[int] = []
        rejected: dict[int, str] = {}
        metrics: dict[str, float] = {}
        for index, group in enumerate(groups):
            reason = None if self.dynamic_sampling is None else rejection_reason(group, self.dynamic_sampling)
            if reason is None:
                passed.append(index)
            else:
                rejected[index] = reason
        if self.dynamic_sampling is not None and groups:
            metrics["dynamic_sampling/passed_frac"] = len(passed) / len(groups)
        for reason, count in Counter(rejected.values()).items():
            metrics[f"dynamic_sampling/rejected/{reason}"] = float(count)
        if not self.carry_over:
            return FilteredGroups([], passed[: self.prompts_per_step], [], rejected, metrics)

        # In order of arrival: there may be more of them than one step has room for.
        trained = list(state.carried_over[: self.prompts_per_step])
        still_waiting = state.carried_over[self.prompts_per_step :]
        metrics["groups/carried_over"] = float(len(trained))
        room = self.prompts_per_step - len(trained)
        state.carried_over = (*still_waiting, *(groups[index] for index in passed[room:]))
        return FilteredGroups(trained, passed[:room], passed[room:], rejected, metrics)


class FilteredGroups(NamedTuple):
    """The groups of a step by their use. It trains on `carried` and `passed`, together `prompts_per_step` at most."""

    carried: list[Group]  # groups that passed in an earlier step, which had no room for them
    passed: list[int]  # indices of this step's groups that are trained on now
    waiting: list[int]  # indices of this step's groups that are carried over to the next
    rejected: dict[int, str]  # indices of this step's groups that did not pass, with the reason
    metrics: dict[str, float]  # metrics of the filter and of the groups carried over


def show_groups(
    groups: Sequence[Group], filtered: FilteredGroups, rows: Sequence[tuple[Experience, ...]]
) -> list[tuple[Group, tuple[Experience, ...], GroupSelection]]:
    """Return the groups that files and metrics of this step show, with the experiences and the selection of each.

    `rows` has the experiences of the groups that are trained on, those carried over first. Each group is shown once: in
    the step that trains on it, or leaves it out with advantages of 0.
    """
    num_carried = len(filtered.carried)
    shown = []
    for group, row in zip(filtered.carried, rows[:num_carried], strict=True):
        shown.append((group, row, GroupSelection("trained", carried_over=True)))
    row_by_index = dict(zip(filtered.passed, rows[num_carried:], strict=True))
    for index, group in enumerate(groups):
        if index in row_by_index:
            shown.append((group, row_by_index[index], GroupSelection("trained")))
        elif index not in filtered.waiting:
            untrained = tuple(Experience(rollout=rollout, advantage=0.0) for rollout in group.rollouts)
            reason = filtered.rejected.get(index)
            selection = GroupSelection("no_room") if reason is None else GroupSelection("rejected", reason)
            shown.append((group, untrained, selection))
    return shown


def rejection_reason(group: Group, options: DynamicSamplingConfig) -> str | None:
    """Return why a group is not trained on: `unscored`, `truncated` or the name of a term; None if it passes.

    Sources: DAPO (arXiv:2503.14476, eq. 11) leaves out groups that are all correct or all incorrect; MM-EUREKA
    (arXiv:2503.07365) those whose mean accuracy is outside [0.1, 0.9].
    """
    if not group.rollouts:
        return "unscored"
    num_truncated = sum(rollout.finish_reason is FinishReason.LENGTH for rollout in group.rollouts)
    if num_truncated / len(group.rollouts) > options.max_truncated_frac:
        return "truncated"
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
    # Bounds are included, and 0.1 + 0.2 counts as 0.3.
    return reward_range.low - EQUALITY_TOLERANCE <= fmean(values) <= reward_range.high + EQUALITY_TOLERANCE
