"""Selection: from the scored groups of a step to the experiences that the learner trains on.

`ExperienceSelector.select` calls all parts, in this order: record rewards, filter groups, compute advantages,
mark staleness, mask truncated responses, replay, advance the curriculum.

Staleness is the age of a rollout's oldest token, in policy versions. A rollout of staleness 0 is on-policy. The
importance ratio of a stale one has one of two denominators; `TokenTable.old_is_recorded_N` in mmrl/learner/tokens.py
says which:

- pi_sampling: the log-probs that were recorded while sampling;
- the policy at the start of the step: recomputed log-probs. `loss.rollout_correction` then adds a weight for the older
  policy that sampled: the decoupled objective of Hilton et al. (arXiv:2110.00641), which AReaL uses (arXiv:2505.24298).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Literal

from mmrl.algo.advantages import EQUALITY_TOLERANCE
from mmrl.algo.replay import ChangedMediaFinder, ReplayResult, ReplaySettings, replay_experiences
from mmrl.algo.reward_history import advance_phase, record_rewards
from mmrl.config.schema import CurriculumPhaseConfig, DynamicSamplingConfig, GroupRewardRangeConfig
from mmrl.types import Experience, FinishReason, Group, GroupSelection, SelectedExperiences, TrainingState

AdvantageFunction = Callable[[Sequence[Group]], Sequence[Sequence[float]]]
"""Returns one advantage for each rollout of each group."""

TurnAdvantageFunction = Callable[[Group, Sequence[float]], Sequence[tuple[float, ...]] | None]
"""Returns advantages of turns, a row for each rollout, from the rollouts' advantages; None if turns share them."""

GroupDecision = tuple[Group, GroupSelection]
"""A group, and the decision if the step trains on it."""

OldLogprobs = Literal["recorded", "recomputed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperienceSelector:
    """Decides what each step of an RL stage trains on; implements `protocols.Selector`."""

    # Called with all groups that passed the filter at once: some formulas compare the whole step.
    compute_advantages: AdvantageFunction
    compute_turn_advantages: TurnAdvantageFunction | None = None  # None: turns share their rollout's advantage
    prompts_per_step: int  # groups that a step trains on at most; read with `dynamic_sampling` or `carry_over`
    dynamic_sampling: DynamicSamplingConfig | None = None  # which groups pass; None for all groups of a single round
    carry_over: bool = False  # groups that a step has no room for wait for the next one; otherwise they are dropped
    mask_truncated: bool = False  # responses that the length limit cut train nothing: `loss.mask_truncated`
    replay: ReplaySettings | None = None  # how rollouts of earlier steps are trained on again; None for never
    find_changed_media: ChangedMediaFinder  # finds rollouts of earlier steps that cannot be used any more
    # Log-probs that a stale rollout's importance ratio divides by; None: as for a fresh one, by `loss.old_logprobs`.
    stale_old_logprobs: OldLogprobs | None = "recorded"
    # True with async or partial rollouts. Their staleness is logged, and that of groups carried over.
    rollouts_span_versions: bool = False
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
        Later rounds need dynamic sampling. They continue while rounds are left and fewer than `prompts_per_step` groups
        have passed, counting those carried over.
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
        sample_means: Sequence[float] = ()
        if self.tracked_terms:
            sample_means = record_rewards(state.reward_history, groups, self.tracked_terms)
        if sample_means:
            state.reset_rewards.append(fmean(sample_means))
        decisions, waiting = self._filter_groups(groups, state.carried_over)
        metrics = self._measure_filter(decisions, num_sampled=len(groups))
        if self.carry_over:
            state.carried_over = waiting
        rows = self._make_experiences(decisions, state.version)
        experiences: list[Experience] = []
        for (_, selection), row in zip(decisions, rows, strict=True):
            experiences += row if selection.status == "trained" else ()
        # The learner leaves masked responses out, so they may neither fill the step nor be replayed later.
        unmasked = drop_masked(experiences, mask_truncated=self.mask_truncated)
        replay = ReplayResult(current=experiences)
        if self.replay is not None:
            replay = replay_experiences(unmasked, state, self.replay, self.find_changed_media)
        if (self.rollouts_span_versions or self.carry_over) and experiences:
            staleness = [experience.staleness for experience in experiences]
            metrics["rollout/staleness_mean"] = fmean(staleness)
            metrics["rollout/staleness_max"] = float(max(staleness))
        metrics |= replay.metrics
        if self.curriculum_phases:
            # Until here the current phase is the one that this step began in.
            metrics["data/curriculum_phase"] = float(state.phase)
            advance_phase(state, sample_means, self.curriculum_phases)
        return SelectedExperiences(
            groups=tuple(group for group, _ in decisions),
            experiences_by_group=tuple(rows),
            selections=tuple(selection for _, selection in decisions),
            experiences=(*replay.current, *replay.replayed),
            replayed=tuple(replay.replayed),
            # Replay is not counted: a solved task would otherwise look alive while only old rollouts train.
            has_signal=any(experience.has_signal for experience in unmasked),
            metrics=metrics,
        )

    def _make_experiences(self, decisions: Sequence[GroupDecision], version: int) -> list[tuple[Experience, ...]]:
        """Return a row of experiences for each group, with advantages of 0 if it is not trained on."""
        trained = [index for index, (_, selection) in enumerate(decisions) if selection.status == "trained"]
        advantage_rows = self.compute_advantages([decisions[index][0] for index in trained])
        advantages_by_index = dict(zip(trained, advantage_rows, strict=True))
        rows = []
        for index, (group, selection) in enumerate(decisions):
            if selection.status != "trained":
                rows.append(tuple(Experience(rollout=rollout, advantage=0.0) for rollout in group.rollouts))
                continue
            # Groups carried over always come from an older policy, so their ratio uses the recorded log-probs.
            stale_old_logprobs = "recorded" if selection.carried_over else self.stale_old_logprobs
            rows.append(self._make_group_experiences(group, advantages_by_index[index], version, stale_old_logprobs))
        return rows

    def _make_group_experiences(
        self, group: Group, advantages: Sequence[float], version: int, stale_old_logprobs: OldLogprobs | None
    ) -> tuple[Experience, ...]:
        """Return an experience for each rollout of a group that is trained on."""
        turn_rows: Sequence[tuple[float, ...] | None] | None = None
        if self.compute_turn_advantages is not None:
            turn_rows = self.compute_turn_advantages(group, advantages)
        turn_rows = turn_rows or [None] * len(advantages)
        experiences = []
        for rollout, advantage, turns in zip(group.rollouts, advantages, turn_rows, strict=True):
            if turns is not None:
                advantage = fmean(turns)  # noqa: PLW2901  # one number for the records of a rollout
            if not isfinite(advantage):  # it would give no gradient and no replay weight
                owner = f"sample {rollout.prompt.sample.id}, rollout {rollout.index}"
                raise ValueError(f"{owner}: advantage {advantage} is not finite")
            staleness = version - rollout.oldest_version
            experience = Experience(
                rollout=rollout,
                advantage=advantage,
                turn_advantages=turns,
                staleness=staleness,
                # Only `loss.old_logprobs` decides about an on-policy rollout.
                old_logprobs_source=stale_old_logprobs if staleness else None,
            )
            experiences.append(experience)
        return tuple(experiences)

    def _filter_groups(
        self, groups: Sequence[Group], carried_over: Sequence[Group]
    ) -> tuple[list[GroupDecision], tuple[Group, ...]]:
        """Decide which groups the step trains on: those carried over first, then as many that pass as it has room for.

        Returns:
            The groups that files and metrics of this step show, in that order; and those that wait for the next step. A
            group is shown once, in the step that trains on it.
        """
        decisions: list[GroupDecision] = []
        waiting: list[Group] = []
        room = len(groups) if self.dynamic_sampling is None and not self.carry_over else self.prompts_per_step
        if self.carry_over:
            # In order of arrival: there may be more of them than one step has room for.
            for group in carried_over[:room]:
                decisions.append((group, GroupSelection("trained", carried_over=True)))
            waiting += carried_over[room:]
        num_trained = len(decisions)
        for group in groups:
            reason = None if self.dynamic_sampling is None else rejection_reason(group, self.dynamic_sampling)
            if reason is not None:
                decisions.append((group, GroupSelection("rejected", reason)))
            elif num_trained < room:
                decisions.append((group, GroupSelection("trained")))
                num_trained += 1
            elif self.carry_over:
                waiting.append(group)
            else:
                decisions.append((group, GroupSelection("no_room")))
        return decisions, tuple(waiting)

    def _measure_filter(self, decisions: Sequence[GroupDecision], *, num_sampled: int) -> dict[str, float]:
        """Return metrics of the filter, for a step that sampled `num_sampled` groups."""
        metrics: dict[str, float] = {}
        rejected = Counter(selection.reason for _, selection in decisions if selection.reason is not None)
        if self.dynamic_sampling is not None and num_sampled:
            metrics["dynamic_sampling/passed_frac"] = (num_sampled - rejected.total()) / num_sampled
        for reason, count in rejected.items():
            metrics[f"dynamic_sampling/rejected/{reason}"] = float(count)
        if self.carry_over:
            metrics["groups/carried_over"] = float(sum(selection.carried_over for _, selection in decisions))
        return metrics


def drop_masked(experiences: Sequence[Experience], *, mask_truncated: bool) -> list[Experience]:
    """Return the experiences that may train: with `loss.mask_truncated`, not those that the length limit cut."""
    masked_reason = FinishReason.LENGTH if mask_truncated else None
    return [experience for experience in experiences if experience.rollout.finish_reason is not masked_reason]


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
    term = reward_range.term
    values = [score.terms[term].value for score in group.scores if term in score.terms]
    if not values:
        return True
    if reward_range.require_mixed and max(values) - min(values) <= EQUALITY_TOLERANCE:
        return False
    # Bounds are included, and 0.1 + 0.2 counts as 0.3.
    return reward_range.low - EQUALITY_TOLERANCE <= fmean(values) <= reward_range.high + EQUALITY_TOLERANCE
