"""Reinforcement learning, whole: ask, answer, judge, choose, learn, tell.

     Sample ──ask──► Prompt ──answer──► Rollout ──judge──► Group ──choose──► Experience ──learn──► new weights
                                            ▲──────────────────── sync ◄──────────────────────────────┘

The loop knows ports and nouns only. What a step draws depends on the run's seed, the step and the sample, never on
a clock or on what ran before, so a run continued from a checkpoint is the run that was never interrupted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mmrl.algo.step_metrics import compute_step_metrics
from mmrl.ports import (
    AsyncRollouts,
    Checkpointer,
    ExperienceSelector,
    Learner,
    MetricsLogger,
    PromptBuilder,
    RewardScorer,
    RolloutPipeline,
    Sampler,
    SampleSource,
    StopCriterion,
)
from mmrl.training.give_up import check_nonfinite_steps, check_steps_without_signal, count_nonfinite_steps
from mmrl.types import Group, Prompt, RolloutBatch, TrainingState


@dataclass(frozen=True, slots=True, kw_only=True)
class RlSettings:
    """The numbers of a stage. A round has `prompts`, waiting ones too; `shape` adds what is earned beside siblings."""

    num_steps: int
    prompts_per_round: int
    add_group_rewards: Callable[[Group, int], Group]
    max_steps_without_signal: int
    max_nonfinite_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RlComponents:
    """The machinery, each behind its port; with `foresight`, steps overlap: one is learned, the next one drawn."""

    source: SampleSource
    prompt_builder: PromptBuilder
    rollout_pipeline: RolloutPipeline
    sampler: Sampler
    scorer: RewardScorer
    selector: ExperienceSelector
    learner: Learner
    logger: MetricsLogger
    stop_criterion: StopCriterion
    checkpointer: Checkpointer
    async_rollouts: AsyncRollouts | None = None


@dataclass(slots=True)
class StepTimer:
    """Wall-clock seconds by verb."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, activity: str) -> Iterator[None]:
        """Time one verb."""
        start = time.perf_counter()
        yield
        name = f"time/{activity}_s"
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def run_rl_stage(settings: RlSettings, components: RlComponents, state: TrainingState) -> None:
    """Run a stage from wherever `state` stands to its end.

    Raises:
        UserError: `max_barren_steps` steps in a row had no group to learn from, or `max_bad_steps` no finite gradient.
    """
    while state.step < settings.num_steps and not state.stage_done:
        clock = StepTimer()

        gathered = CollectedGroups()
        while components.selector.needs_another_round(gathered.groups, state, rounds=gathered.rounds):
            collect_round(settings, components, state, gathered, clock)

        # 4. Choose: what a rollout teaches is how much better it did than its siblings.
        with clock.time("select"):
            choice = components.selector.select(gathered.groups, state)

        # 5. Learn: one update, and the sampler follows once it has drawn the step to come, if it does so meanwhile.
        coming = start_next_rollouts(settings, components, state, clock)
        with clock.time("learn"):
            learned = components.learner.step(choice.experiences, step=state.step)
        with clock.time("rollout"):
            state.prefetched = coming()
        with clock.time("learn"):
            components.sampler.sync(state.version + 1)

        # 6. Tell: record the step; perhaps this is the end, or time to save.
        state.step, state.version = state.step + 1, state.version + 1
        count_nonfinite_steps(state, learned)
        kept = components.logger.log_rollouts(state, choice.groups, choice.advantages, force=state.nonfinite_steps > 0)
        said = {
            **gathered.metrics,
            **compute_step_metrics(choice.groups, choice.advantages),
            **choice.metrics,
            **learned,
        }
        components.logger.log(state, said, clock.seconds)
        check_steps_without_signal(
            state, settings.max_steps_without_signal, [[e.advantage for e in choice.experiences]]
        )
        check_nonfinite_steps(state, settings.max_nonfinite_steps, kept)
        state.stage_done = components.stop_criterion.should_stop(state)
        components.checkpointer.save(state)


@dataclass(slots=True)
class CollectedGroups:
    """What the rounds of a step have brought so far."""

    groups: list[Group] = field(default_factory=list)
    metrics: Counter[str] = field(default_factory=Counter)
    rounds: int = 0


def collect_round(
    settings: RlSettings, components: RlComponents, state: TrainingState, collected: CollectedGroups, timer: StepTimer
) -> None:
    """One round of questions, answered and judged."""
    ahead, state.prefetched = state.prefetched, None
    if ahead is not None and components.async_rollouts is not None:
        answers = components.async_rollouts.take(ahead, version=state.version)
    else:
        prompts = build_prompts(settings, components, state, timer)

        # 2. Answer: every prompt gets a group of rollouts.
        with timer.time("rollout"):
            answers = components.rollout_pipeline.run(prompts, step=state.step, unfinished=state.unfinished)

    # 3. Judge: rewards score each rollout, group terms compare it with its siblings.
    with timer.time("score"):
        groups = components.scorer.score_groups(answers.groups, step=state.step, probes=answers.probes)
        collected.groups += [settings.add_group_rewards(group, state.step) for group in groups]
    collected.metrics.update(answers.metrics)
    collected.rounds += 1
    state.unfinished = answers.unfinished


def build_prompts(
    settings: RlSettings, components: RlComponents, state: TrainingState, timer: StepTimer
) -> list[Prompt]:
    """The questions of a round."""
    # 1. Ask: the next samples become prompts.
    with timer.time("prompt"):
        count = settings.prompts_per_round - len(state.unfinished)
        samples = components.source.take(state.data_position, count)
        state.data_position += count
        return [components.prompt_builder.build(sample) for sample in samples]


def start_next_rollouts(
    settings: RlSettings, components: RlComponents, state: TrainingState, timer: StepTimer
) -> Callable[[], RolloutBatch | None]:
    """Have the first round of the step to come answered from now on; what is returned waits for it."""
    if components.async_rollouts is None or state.step + 1 == settings.num_steps:
        return lambda: None
    prompts = build_prompts(settings, components, state, timer)
    return components.async_rollouts.start(prompts, step=state.step + 1, version=state.version)
