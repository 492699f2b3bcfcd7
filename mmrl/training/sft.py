"""The supervised loop: build demonstrations, learn, call back. Imports without torch.

Ranks exchange their demonstrations; each then trains on its share of all of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from mmrl.config.schema import SftStage
from mmrl.data.demonstrations import demonstration_text
from mmrl.distributed.exchanges import count_dropped_samples, gather_demonstrations, sum_metrics
from mmrl.distributed.ranks import MediaOwners, Ranks
from mmrl.protocols import DemonstrationCompleter, Learner, Processor, SampleSource
from mmrl.training.callbacks import Callback, StepTimer, TrainStepResult
from mmrl.types import Experience, Group, Rollout, Sample, Score, SelectedExperiences, TrainingState
from mmrl.utils.activity import Activity
from mmrl.utils.seeds import derive_seed

if TYPE_CHECKING:
    from mmrl.rollout.factory import SamplerFactory


@dataclass(frozen=True, slots=True, kw_only=True)
class SftComponents:
    """The parts of one supervised stage. `mmrl.protocols` says what each of them does."""

    source: SampleSource
    processor: Processor
    samplers: SamplerFactory  # frees the rollout engine's memory on the learner's device until it is next used
    learner: Learner
    callbacks: Sequence[Callback]  # called after each step, in this order
    seed: int  # the run's seed, from which random choices derive, with the stage's name
    ranks: Ranks
    media_owners: MediaOwners  # records which rank has the media of each prompt in memory, for the learner
    tools: DemonstrationCompleter | None = None  # answers tool calls in demonstrations, where the stage has tools
    activity: Activity = field(default_factory=Activity)  # shows on the console what a step is doing


def run_sft_stage(stage: SftStage, components: SftComponents, state: TrainingState) -> None:
    """Train a supervised stage from `state.step` to its end.

    Raises:
        UserError: a sample has nothing to imitate, a tool call in a demonstration cannot be answered, or no rank has a
            usable sample. Errors of callbacks pass through.
    """
    ranks = components.ranks
    while state.step < stage.steps and not state.stage_done:
        timer = StepTimer(components.activity)
        with timer.time("prompt"):
            samples = components.source.take(state.data_position, stage.batch_size)
            build = partial(build_demonstration, stage, components, step=state.step)
            demonstrations: Sequence[Rollout] = list(map(build, samples))
            metrics: dict[str, float] = {}
            if components.tools is not None:
                demonstrations, tool_metrics = components.tools.complete(demonstrations)
                metrics |= sum_metrics(tool_metrics, ranks)
        with timer.time("learn"):
            metrics |= count_dropped_samples(stage.batch_size, len(samples), ranks)
            components.media_owners.clear()
            own_experiences = [Experience(rollout=rollout, advantage=0.0) for rollout in demonstrations]
            experiences = gather_demonstrations(own_experiences, ranks, components.media_owners)
            components.samplers.sleep()
            metrics |= components.learner.step(experiences, step=state.step)

        # No weight sync: validation, benchmarks and stages that sample sync the weights before they generate.
        state.step, state.version = state.step + 1, state.version + 1
        state.data_position += stage.batch_size
        result = TrainStepResult(selected=_as_selected(own_experiences), metrics=metrics, seconds=timer.seconds)
        for callback in components.callbacks:
            callback.on_step_end(state, result)


def build_demonstration(stage: SftStage, components: SftComponents, sample: Sample, step: int) -> Rollout:
    """Build the rollout to imitate for a sample, with its thinking unless chance drops it at this step."""
    chance = random.Random(derive_seed(components.seed, stage.name, "thought", step, sample.id))
    return components.processor.build_demonstration(
        components.processor.build(sample),
        demonstration_text(sample, stage.target_field),
        with_thinking=chance.random() >= stage.drop_thinking_prob,
        loss_on=stage.loss_on,
    )


def _as_selected(experiences: Sequence[Experience]) -> SelectedExperiences:
    """Return demonstrations as callbacks expect them: groups of one rollout, with NaN for the missing reward."""
    unscored = Score(terms={}, total=math.nan)
    groups = []
    for experience in experiences:
        rollout = experience.rollout
        groups.append(Group(prompt=rollout.prompt, rollouts=(rollout,), scores=(unscored,)))
    scored = tuple((experience,) for experience in experiences)
    return SelectedExperiences(groups=tuple(groups), scored=scored, experiences=tuple(experiences), has_signal=False)
