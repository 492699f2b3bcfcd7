"""Imitation of demonstrations, with the nouns and the learner of the RL loop."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmrl.algo.seeds import derive_seed
from mmrl.config.schema import SftStage
from mmrl.data.demonstrations import TargetField, demonstration_text
from mmrl.ports import (
    Checkpointer,
    DemonstrationCompleter,
    Learner,
    MetricsLogger,
    PromptBuilder,
    SampleSource,
    StopCriterion,
)
from mmrl.training.give_up import check_nonfinite_steps, count_nonfinite_steps
from mmrl.training.rl import StepTimer
from mmrl.types import Experience, Group, Rollout, Sample, Score, TrainingState


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSettings:
    """The numbers of a stage: `imitate` says what is learned, `learn` which part of it, `thought_dropout` how often it
    comes without its thinking, by chance that derives from `salt`.
    """

    num_steps: int
    batch_size: int
    target_field: TargetField
    loss_on: Literal["response", "answer"]
    drop_thinking_prob: float
    seed_parts: tuple[str | int, ...]
    max_nonfinite_steps: int


def build_sft_settings(stage: SftStage, seed: int) -> SftSettings:
    """The plan of a stage in a run of this seed."""
    return SftSettings(
        num_steps=stage.steps,
        batch_size=stage.batch_size,
        target_field=stage.target_field,
        loss_on=stage.loss_on,
        drop_thinking_prob=stage.drop_thinking_prob,
        seed_parts=(seed, stage.name),
        max_nonfinite_steps=stage.max_nonfinite_steps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SftComponents:
    """The machinery, each behind its port; `tools` answer the calls of demonstrations, where any are to be answered."""

    source: SampleSource
    prompt_builder: PromptBuilder
    learner: Learner
    logger: MetricsLogger
    stop_criterion: StopCriterion
    checkpointer: Checkpointer
    tools: DemonstrationCompleter | None = None


def run_sft_stage(settings: SftSettings, components: SftComponents, state: TrainingState) -> None:
    """Run a stage from wherever `state` stands to its end.

    Raises:
        UserError: a sample has no label to imitate, a call in one cannot be answered, or `max_bad_steps` steps in a
            row had no finite gradient.
    """
    while state.step < settings.num_steps and not state.stage_done:
        clock = StepTimer()
        with clock.time("prompt"):
            samples = components.source.take(state.data_position, settings.batch_size)
            rollouts: Sequence[Rollout] = [
                _build_demonstration(settings, components.prompt_builder, each, state.step) for each in samples
            ]
            rollouts, told = components.tools.complete(rollouts) if components.tools else (rollouts, {})
        with clock.time("learn"):
            learned = components.learner.step([Experience(rollout=r, advantage=0.0) for r in rollouts], step=state.step)
        state.step, state.data_position, state.version = (
            state.step + 1,
            state.data_position + settings.batch_size,
            state.version + 1,
        )
        skipped = {"data/dropped": float(settings.batch_size - len(samples))}
        components.logger.log(state, {**skipped, **told, **learned}, clock.seconds)
        count_nonfinite_steps(state, learned)
        if state.nonfinite_steps:
            kept = components.logger.log_rollouts(state, *_as_unscored_groups(rollouts), force=True)
            check_nonfinite_steps(state, settings.max_nonfinite_steps, kept)
        state.stage_done = components.stop_criterion.should_stop(state)
        components.checkpointer.save(state)


def _as_unscored_groups(demonstrations: Sequence[Rollout]) -> tuple[list[Group], list[tuple[float]]]:
    """Demonstrations as groups of one that no reward has judged."""
    score = Score(terms={}, total=math.nan)
    return [Group(prompt=each.prompt, rollouts=(each,), scores=(score,)) for each in demonstrations], [(0.0,)] * len(
        demonstrations
    )


def _build_demonstration(settings: SftSettings, prompt_builder: PromptBuilder, sample: Sample, step: int) -> Rollout:
    thinks = (
        random.Random(derive_seed(*settings.seed_parts, "thought", step, sample.id)).random()
        >= settings.drop_thinking_prob
    )
    return prompt_builder.build_demonstration(
        prompt_builder.build(sample),
        demonstration_text(sample, settings.target_field),
        with_thinking=thinks,
        loss_on=settings.loss_on,
    )
