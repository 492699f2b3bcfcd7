"""The reinforcement learning loop: build prompts, roll out, score, select, learn, sync weights, call back.

What a step generates depends on the run's seed, the step and the sample, never on a clock or on earlier random draws,
so a run resumed from a checkpoint equals one that was never interrupted. Imports without torch.

A round is one batch of prompts, rolled out and scored together. A step has one round, several with dynamic sampling, or
none if groups of earlier steps fill it. Three kinds of rollouts cross from one step to the next, in `TrainingState`:
`unfinished` responses that partial rollouts cut off, the `next_batch` of asynchronous rollouts, and scored groups that
are `carried_over`.

The functions of `mmrl.distributed.exchanges`, all but `own_share`, are collective: all ranks of a run call them, in the
same order, even a rank without samples. In a single process they return what they are given.
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
from mmrl.distributed.ranks import MediaOwners, Ranks, rank_slice
from mmrl.protocols import Learner, Processor, RewardScorer, RolloutPipeline, SampleSource, Selector
from mmrl.scoring.group_rewards import BoundGroupReward, add_group_rewards
from mmrl.training.async_rollouts import AsyncRollouts, PendingRound
from mmrl.training.callbacks import Callback, StepTimer, TrainStepResult
from mmrl.types import Group, Prompt, RolloutBatch, TrainingState
from mmrl.utils.activity import Activity

if TYPE_CHECKING:
    from mmrl.rollout.factory import SamplerFactory


@dataclass(frozen=True, slots=True, kw_only=True)
class RlComponents:
    """The sizes and parts of one RL stage. `mmrl.protocols` says what each part does."""

    num_steps: int  # training steps of the stage
    prompts_per_round: int  # prompts that all ranks together roll out at a time
    source: SampleSource
    processor: Processor
    rollout_pipeline: RolloutPipeline
    samplers: SamplerFactory  # gathers sharded weights for generating; the engine sleeps while they learn
    async_rollouts: AsyncRollouts | None  # generates a step's first round while the step before it learns, if set
    scorer: RewardScorer
    group_rewards: Sequence[BoundGroupReward]  # rewards that compare siblings
    selector: Selector  # decides how often to sample in a step, and which rollouts it trains on
    learner: Learner
    update_reference: Callable[[int], Mapping[str, float]]  # moves the KL reference after a step; returns metrics
    sync_weights: Callable[[int], None]  # gives the sampler the new weights, with their version number
    callbacks: Sequence[Callback]  # called after each step, in this order
    ranks: Ranks
    media_owners: MediaOwners  # records which rank has the media of each prompt in memory, for the learner
    activity: Activity = field(default_factory=Activity)  # shows on the console what a step is doing


@dataclass(slots=True)
class StepBatch:
    """All that one step has sampled so far. A group is a prompt with its rollouts and their scores."""

    groups: list[Group] = field(default_factory=list)  # those of all ranks
    metrics: Counter[str] = field(default_factory=Counter)  # sums over the sampling rounds, by full name
    rounds: int = 0  # batches of prompts that were rolled out and scored so far
    timer: StepTimer = field(default_factory=StepTimer)


def run_rl_stage(components: RlComponents, state: TrainingState) -> None:
    """Train an RL stage from `state.step` to its end."""
    while state.step < components.num_steps and not state.stage_done:
        collected = StepBatch(timer=StepTimer(components.activity))
        timer = collected.timer
        collect_groups(components, state, collected)

        # Filters groups, computes advantages and adds replay. An experience is a rollout with its advantage.
        # Collective: ranks agree on which replayed rollouts have media that changed.
        with timer.time("select"):
            selected = components.selector.select(collected.groups, state)
        # With `async_rollouts`, the next step's first round is generated while the learner works.
        next_round = None
        if components.async_rollouts is not None and state.step + 1 < components.num_steps:
            prompts = build_prompts(components, state, components.prompts_per_round, timer)
            next_round = components.async_rollouts.start(prompts, step=state.step + 1, version=state.version)
        with timer.time("learn"):
            components.samplers.sleep()
            learner_metrics = components.learner.step(selected.experiences, step=state.step)
            reference_metrics = components.update_reference(state.step)
        # The next round samples with weights `state.version`, so it must be complete before the sampler gets new ones.
        if next_round is not None:
            with timer.time("rollout"):
                state.next_batch = finish_next_round(next_round, components.prompts_per_round, components.ranks)
        with timer.time("learn"):
            components.sync_weights(state.version + 1)

        # From here on rollouts are sampled from the new weights, whose number is `state.version`.
        state.step, state.version = state.step + 1, state.version + 1
        metrics = {**collected.metrics, **compute_step_metrics(selected.groups, selected.scored), **selected.metrics}
        metrics |= {**learner_metrics, **reference_metrics}
        result = TrainStepResult(selected=selected, metrics=metrics, seconds=timer.seconds)
        for callback in components.callbacks:
            callback.on_step_end(state, result)


def collect_groups(components: RlComponents, state: TrainingState, collected: StepBatch) -> None:
    """Generate and score rounds: one, several with dynamic sampling, or none if enough groups wait."""
    ranks, selector, timer = components.ranks, components.selector, collected.timer
    components.media_owners.clear()
    with timer.time("select"):
        # Before they are counted, because groups that this drops must be replaced in this step. Collective.
        collected.metrics.update(selector.recheck_carried_over(state))
    while state.next_batch is not None or selector.needs_another_round(
        collected.groups, state, rounds=collected.rounds
    ):
        if state.next_batch is None:
            own_batch, metrics = generate_round(components, state, timer)
        else:  # generated while the step before was learned, with the groups of all ranks
            own_batch, metrics = own_share(state.next_batch, ranks), state.next_batch.metrics
            state.next_batch = None
        with timer.time("score"):
            own_groups = components.scorer.score_groups(own_batch.groups, step=state.step, probes=own_batch.probes)
            for group in gather_groups(own_groups, ranks, components.media_owners):
                # Rank 0 calls group rewards that run in another process, for all ranks: this call is collective, too.
                compared = add_group_rewards(group, state.step, group_rewards=components.group_rewards)
                collected.groups.append(compared)
        collected.metrics.update(metrics)
        collected.rounds += 1


def generate_round(
    components: RlComponents, state: TrainingState, timer: StepTimer
) -> tuple[RolloutBatch, Mapping[str, float]]:
    """Roll out one round of prompts; return this rank's rollouts, and the metrics of all ranks.

    With partial rollouts, unfinished groups go to `state.unfinished`.
    """
    # Groups that an earlier round left unfinished take the first places of this round, and new prompts the rest. Each
    # rank works on its own slice of the places.
    ranks, num_unfinished = components.ranks, len(state.unfinished)
    num_prompts = components.prompts_per_round - num_unfinished
    own_unfinished = state.unfinished[rank_slice(components.prompts_per_round, ranks)]
    prompts = build_prompts(components, state, num_prompts, timer)
    with timer.time("rollout"):
        with components.samplers.gather_for_sampling():  # collective under ZeRO-3, if the policy itself generates
            batch = components.rollout_pipeline.run(prompts, step=state.step, unfinished=own_unfinished)
        metrics = sum_metrics(batch.metrics, ranks)
        state.unfinished = gather_items(batch.unfinished, ranks)
    metrics |= count_dropped_samples(num_prompts, len(prompts), ranks, may_be_all=num_unfinished > 0)
    return batch, metrics


def build_prompts(components: RlComponents, state: TrainingState, count: int, timer: StepTimer) -> list[Prompt]:
    """Build this rank's prompts of the next `count` samples. Samples that cannot be used are missing."""
    with timer.time("prompt"):
        samples = components.source.take(state.data_position, count)
        state.data_position += count
        return [components.processor.build(sample) for sample in samples]


def finish_next_round(next_round: PendingRound, prompts_per_round: int, ranks: Ranks) -> RolloutBatch:
    """Wait for this rank's rollouts; return those of all ranks, so that every rank can save the same state."""
    own_batch = next_round.wait()
    metrics = sum_metrics(own_batch.metrics, ranks)
    metrics |= count_dropped_samples(prompts_per_round, len(next_round.prompts), ranks)
    return replace(gather_batch(own_batch, ranks), metrics=metrics)
