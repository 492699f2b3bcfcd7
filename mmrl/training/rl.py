"""The reinforcement learning loop: build prompts, roll out, score, select, learn, sync weights, call back.

The rollouts of a step depend on the run's seed, the step and the sample, never on a clock or on earlier random draws,
so a run resumed from a checkpoint equals one that was never interrupted. Imports without torch.

A round is one batch of prompts, rolled out and scored together. A step has one round, several with dynamic sampling, or
none if groups of earlier steps fill it. Four kinds of rollouts cross from one step to the next, in `TrainingState`:
`unfinished` responses that partial rollouts cut off, the `next_batch` of asynchronous rollouts, scored groups that are
`carried_over`, and the `replay_buffer`.

The functions of `mmrl.distributed.exchanges`, all but `own_share`, are collective: all ranks of a run call them, in the
same order, even a rank without samples. So are `gather_for_sampling`, the rollout pipeline with partial rollouts,
selection, learner, reference, weight sync and callbacks; docs/design.md lists what each exchanges. In a single process
they exchange nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mmrl.algo.group_metrics import compute_step_metrics
from mmrl.distributed.exchanges import (
    count_dropped_samples,
    gather_batch,
    gather_groups,
    gather_items,
    own_share,
    sum_metrics,
)
from mmrl.distributed.ranks import Ranks, own_slice
from mmrl.protocols import Learner, Processor, RewardScorer, RolloutPipeline, SampleSource, Selector
from mmrl.scoring.group_reward_calls import BoundGroupReward, apply_group_rewards
from mmrl.training.async_rollouts import AsyncRollouts, PendingBatch
from mmrl.training.callbacks import Callback, StepTimer, TrainStepResult
from mmrl.types import Group, Prompt, RolloutBatch, TrainingState
from mmrl.utils.activity import Activity

if TYPE_CHECKING:
    from mmrl.rollout.shared_engine import SharedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class RlParts:
    """The sizes and parts of one RL stage. `mmrl.protocols` says what each part does."""

    num_steps: int  # training steps of the stage
    prompts_per_round: int  # prompts that all ranks together roll out at a time
    source: SampleSource
    processor: Processor
    rollout_pipeline: RolloutPipeline
    engine: SharedEngine  # generates for the pipeline; sleeps while the learner works, except with `async_rollouts`
    async_rollouts: AsyncRollouts | None  # generates a step's first round while the step before it learns, if set
    scorer: RewardScorer
    group_rewards: Sequence[BoundGroupReward]  # rewards that compare siblings
    selector: Selector  # decides how often to sample in a step, and which rollouts it trains on
    learner: Learner
    # Moves the KL reference after a step, and returns metrics; None if there is none, or it never moves.
    update_reference: Callable[[TrainingState], Mapping[str, float]] | None
    sync_weights: Callable[[int], None]  # has the engine load the new weights, of this version
    callbacks: Sequence[Callback]  # called after each step, in this order
    ranks: Ranks
    activity: Activity = field(default_factory=Activity)  # shows on the console what a step is doing


def train_rl(parts: RlParts, state: TrainingState) -> None:
    """Train an RL stage from `state.step` to its end."""
    while state.step < parts.num_steps and not state.stage_done:
        timer = StepTimer(parts.activity)
        groups, rollout_metrics = collect_groups(parts, state, timer)

        # Filters groups, computes advantages and adds replay. An experience is a rollout with its advantage.
        # Collective with replay: ranks agree on which replayed rollouts have media that changed.
        with timer.time("select"):
            selected = parts.selector.select(groups, state)
        # The next step's samples begin here. `PriorityOrder` reads it, and weighs samples by the rewards so far.
        state.step_data_start = state.data_position
        # With `async_rollouts`, the next step's first round is generated while the learner works.
        pending_batch = None
        if parts.async_rollouts is not None and state.step + 1 < parts.num_steps:
            prompts = build_prompts(parts, state, parts.prompts_per_round, timer)
            pending_batch = parts.async_rollouts.start(prompts, step=state.step + 1, version=state.version)
        with timer.time("learn"):
            parts.engine.sleep()
            learner_metrics = dict(parts.learner.step(selected.experiences, step=state.step))
            if parts.update_reference is not None:
                learner_metrics |= parts.update_reference(state)
        # The next round samples from weights `state.version`, so it must be complete before the engine gets new ones.
        if pending_batch is not None:
            with timer.time("rollout"):
                state.next_batch = finish_next_batch(pending_batch, parts.prompts_per_round, parts.ranks)
        with timer.time("learn"), parts.activity.during("sync"):
            parts.sync_weights(state.version + 1)

        # From here on rollouts are sampled from the new weights, whose number is `state.version`.
        state.step, state.version = state.step + 1, state.version + 1
        step_metrics = compute_step_metrics(selected.groups, selected.experiences_by_group)
        metrics = {**rollout_metrics, **step_metrics, **selected.metrics, **learner_metrics}
        result = TrainStepResult(selected=selected, metrics=metrics, seconds=timer.seconds)
        for callback in parts.callbacks:
            callback.on_step_end(state, result)


def collect_groups(
    parts: RlParts, state: TrainingState, timer: StepTimer
) -> tuple[Sequence[Group], Mapping[str, float]]:
    """Generate and score rounds: one, several with dynamic sampling, or none if enough groups wait.

    Returns:
        The scored groups of all ranks, and the counts of the rollout steps, summed over rounds, by full name.
    """
    groups: list[Group] = []
    metrics: Counter[str] = Counter()
    num_rounds = 0
    parts.ranks.media_ranks.clear()
    with timer.time("select"):
        # Before they are counted, because groups that this drops must be replaced in this step. Collective.
        metrics.update(parts.selector.recheck_carried_over(state))
    while state.next_batch is not None or parts.selector.needs_another_round(groups, state, rounds=num_rounds):
        if state.next_batch is None:
            own_batch, round_metrics = generate_round(parts, state, timer)
        else:  # generated while the step before was learned, with the groups of all ranks
            own_batch, round_metrics = own_share(state.next_batch, parts.ranks), state.next_batch.metrics
            state.next_batch = None
        with timer.time("score"):
            # Probes are rollouts that never train, such as answers with the image hidden; they are only scored.
            own_groups = []
            for group in parts.scorer.score_groups(own_batch.groups, step=state.step, probes=own_batch.probes):
                own_groups.append(apply_group_rewards(group, state.step, group_rewards=parts.group_rewards))
            groups += gather_groups(own_groups, parts.ranks)
        metrics.update(round_metrics)  # a Counter adds
        num_rounds += 1
    return groups, metrics


def generate_round(parts: RlParts, state: TrainingState, timer: StepTimer) -> tuple[RolloutBatch, Mapping[str, float]]:
    """Roll out one round of prompts; return this rank's rollouts, and the metrics of all ranks.

    With partial rollouts, unfinished groups go to `state.unfinished`.
    """
    # A round consists of the groups that an earlier one left unfinished, followed by new prompts. Each rank works on
    # its own slice of that sequence; the source takes the part of the new prompts by `own_rows`.
    num_unfinished = len(state.unfinished)
    num_prompts = parts.prompts_per_round - num_unfinished
    prompts = build_prompts(parts, state, num_prompts, timer)
    unfinished = state.unfinished[own_slice(parts.prompts_per_round, parts.ranks)]
    with timer.time("rollout"):
        with parts.engine.gather_for_sampling():  # collective under ZeRO-3, if the policy itself generates
            batch = parts.rollout_pipeline.run(prompts, step=state.step, unfinished=unfinished)
        metrics = sum_metrics(batch.metrics, parts.ranks)
        state.unfinished = gather_items(batch.unfinished, parts.ranks)
    metrics |= count_dropped_samples(num_prompts, len(prompts), parts.ranks, may_be_all=num_unfinished > 0)
    return batch, metrics


def build_prompts(parts: RlParts, state: TrainingState, count: int, timer: StepTimer) -> list[Prompt]:
    """Build this rank's prompts of the next `count` samples. Samples that cannot be used are missing."""
    with timer.time("prompt"):
        samples = parts.source.take(state.data_position, count)  # this rank's part of them: `own_rows`
        state.data_position += count
        return [parts.processor.build(sample) for sample in samples]


def finish_next_batch(pending_batch: PendingBatch, prompts_per_round: int, ranks: Ranks) -> RolloutBatch:
    """Wait for this rank's rollouts. Return the rollouts of all ranks, so that every rank can save the same state."""
    own_batch = pending_batch.wait()
    metrics = sum_metrics(own_batch.metrics, ranks)
    metrics |= count_dropped_samples(prompts_per_round, len(pending_batch.prompts), ranks)
    return replace(gather_batch(own_batch, ranks), metrics=metrics)
