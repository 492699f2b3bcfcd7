"""The reinforcement learning loop: build prompts, roll out, score, select, learn, sync weights, call back.

What a step generates depends on the run's seed, the step and the sample, never on a clock or on earlier random draws,
so a run resumed from a checkpoint equals one that was never interrupted. Imports without torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mmrl.algo.step_metrics import compute_step_metrics
from mmrl.distributed.ranks import Ranks, count_dropped_samples
from mmrl.ports import ExperienceSelector, Learner, PromptBuilder, RewardScorer, RolloutPipeline, SampleSource
from mmrl.training.callbacks import Callback, StepResult, StepTimer
from mmrl.types import Group, Prompt, RolloutBatch, SelectedExperiences, TrainingState


@dataclass(frozen=True, slots=True, kw_only=True)
class RlSettings:
    """Sizes of one RL stage."""

    num_steps: int  # training steps of the stage
    prompts_per_round: int  # prompts that all ranks together roll out at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class RlComponents:
    """The parts of one RL stage. `mmrl.ports` says what each of them does."""

    source: SampleSource
    prompt_builder: PromptBuilder
    rollout_pipeline: RolloutPipeline
    scorer: RewardScorer
    add_group_rewards: Callable[[Group, int], Group]  # adds rewards that compare siblings, weighted as at a step
    selector: ExperienceSelector  # decides how often to sample in a step, and which rollouts it trains on
    learner: Learner
    update_reference: Callable[[int], Mapping[str, float]]  # moves the KL reference after a step; returns metrics
    sync_weights: Callable[[int], None]  # gives the sampler the new weights, with their version number
    callbacks: Sequence[Callback]  # called after each step, in this order
    ranks: Ranks


@dataclass(slots=True)
class CollectedGroups:
    """All that one step has sampled so far. A group is a prompt with its rollouts and their scores."""

    groups: list[Group] = field(default_factory=list)
    metrics: Counter[str] = field(default_factory=Counter)  # sums over the sampling rounds, by full name
    rounds: int = 0  # sampling rounds so far; in each, a batch of prompts was rolled out and scored
    timer: StepTimer = field(default_factory=StepTimer)


def run_rl_stage(settings: RlSettings, components: RlComponents, state: TrainingState) -> None:
    """Train an RL stage from `state.step` to its end. `run_async_rl_stage` generates while the learner works."""
    while state.step < settings.num_steps and not state.stage_done:
        collected = CollectedGroups()
        collect_groups(settings, components, state, collected)

        # Computes advantages and leaves out what teaches nothing. An experience is a rollout with its advantage.
        with collected.timer.time("select"):
            selected = components.selector.select(collected.groups, state)
        with collected.timer.time("learn"):
            learner_metrics = components.learner.step(selected.experiences, step=state.step)
            reference_metrics = components.update_reference(state.step)
            components.sync_weights(state.version + 1)
        end_step(components, state, collected, selected, {**learner_metrics, **reference_metrics})


def collect_groups(
    settings: RlSettings, components: RlComponents, state: TrainingState, collected: CollectedGroups
) -> None:
    """Build prompts, generate and score: once, several times with dynamic sampling, or never if enough groups wait."""
    while components.selector.needs_another_round(collected.groups, state, rounds=collected.rounds):
        # With partial rollouts, responses that an earlier step cut off midway are finished before new ones begin.
        num_prompts = settings.prompts_per_round - len(state.unfinished)
        prompts = build_prompts(components, state, num_prompts, collected.timer)
        with collected.timer.time("rollout"):
            batch = components.rollout_pipeline.run(prompts, step=state.step, unfinished=state.unfinished)
        collected.metrics.update(count_dropped_samples(num_prompts, len(prompts), components.ranks))
        score_batch(components, state, batch, collected)
    if not collected.rounds:  # groups carried over fill the step; ranks exchange an empty round, as in any other
        score_batch(components, state, RolloutBatch(groups=(), unfinished=state.unfinished), collected)


def build_prompts(components: RlComponents, state: TrainingState, count: int, timer: StepTimer) -> list[Prompt]:
    """Build prompts of the next `count` samples. Samples that cannot be used are missing from the result."""
    with timer.time("prompt"):
        samples = components.source.take(state.data_position, count)
        state.data_position += count
        return [components.prompt_builder.build(sample) for sample in samples]


def score_batch(
    components: RlComponents, state: TrainingState, batch: RolloutBatch, collected: CollectedGroups
) -> None:
    """Score the rollouts of one round and add their groups to `collected`."""
    with collected.timer.time("score"):
        for group in components.scorer.score_groups(batch.groups, step=state.step, probes=batch.probes):
            collected.groups.append(components.add_group_rewards(group, state.step))
    collected.metrics.update(batch.metrics)
    collected.rounds += 1
    state.unfinished = batch.unfinished


def end_step(
    components: RlComponents,
    state: TrainingState,
    collected: CollectedGroups,
    selected: SelectedExperiences,
    learner_metrics: Mapping[str, float],
) -> None:
    """Count the step, put its metrics together, and run the callbacks."""
    # From here on rollouts are sampled from the new weights, whose number is `state.version`.
    state.step, state.version = state.step + 1, state.version + 1
    metrics = {**collected.metrics, **compute_step_metrics(selected.groups, selected.advantages), **selected.metrics}
    result = StepResult(selected=selected, metrics={**metrics, **learner_metrics}, seconds=collected.timer.seconds)
    for callback in components.callbacks:
        callback.on_step_end(state, result)
