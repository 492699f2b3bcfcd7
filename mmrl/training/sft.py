"""The supervised loop: build demonstrations, learn, call back. Imports without torch.

Ranks exchange their demonstrations. Each then trains on a share of all of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmrl.config.schema import SftStage
from mmrl.data.demonstrations import demonstration_text
from mmrl.distributed.exchanges import count_dropped_samples, gather_groups, sum_metrics
from mmrl.distributed.ranks import Ranks
from mmrl.protocols import DemonstrationCompleter, Learner, Processor, SampleSource
from mmrl.training.callbacks import Callback, StepTimer, TrainStepResult
from mmrl.types import Experience, Group, Rollout, Sample, Score, SelectedExperiences, TrainingState
from mmrl.utils.activity import Activity
from mmrl.utils.seeds import derive_seed

if TYPE_CHECKING:
    from mmrl.rollout.shared_engine import SharedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class SftParts:
    """The parts of one supervised stage. `mmrl.protocols` says what each of them does."""

    source: SampleSource
    processor: Processor
    engine: SharedEngine  # the rollout engine, which sleeps while the learner works
    learner: Learner
    callbacks: Sequence[Callback]  # called after each step, in this order
    seed: int  # the run's seed, from which random choices derive, with the stage's name
    ranks: Ranks
    completer: DemonstrationCompleter | None = None  # adds results of tools, or plays an environment; None without
    activity: Activity = field(default_factory=Activity)  # shows on the console what a step is doing


def train_sft(stage: SftStage, parts: SftParts, state: TrainingState) -> None:
    """Train a supervised stage from `state.step` to its end.

    Raises:
        UserError: a sample has nothing to imitate, a tool call in a demonstration cannot be answered, or no rank has a
            usable sample. Errors of callbacks pass through.
    """
    ranks = parts.ranks
    while state.step < stage.steps and not state.stage_done:
        timer = StepTimer(parts.activity)
        with timer.time("prompt"):
            samples = parts.source.take(state.data_position, stage.prompts_per_step)
            demonstrations: Sequence[Rollout] = [
                build_demonstration(stage, parts, sample, state.step) for sample in samples
            ]
            metrics: dict[str, float] = {}
            if parts.completer is not None:
                demonstrations, counts = parts.completer.complete(demonstrations)
                metrics |= sum_metrics(counts, ranks)
        with timer.time("learn"):
            metrics |= count_dropped_samples(stage.prompts_per_step, len(samples), ranks)
            ranks.media_ranks.clear()
            # A demonstration is a group of one rollout, without a reward.
            unscored = Score(terms={}, total=math.nan)
            own_groups = [Group(prompt=demo.prompt, rollouts=(demo,), scores=(unscored,)) for demo in demonstrations]
            selected = select_demonstrations(gather_groups(own_groups, ranks))
            parts.engine.sleep()
            metrics |= parts.learner.step(selected.experiences, step=state.step)

        # No weight sync: validation, benchmarks and stages that sample sync the weights before they generate.
        state.step, state.version = state.step + 1, state.version + 1
        state.data_position += stage.prompts_per_step
        result = TrainStepResult(selected=selected, metrics=metrics, seconds=timer.seconds)
        for callback in parts.callbacks:
            callback.on_step_end(state, result)


def build_demonstration(stage: SftStage, parts: SftParts, sample: Sample, step: int) -> Rollout:
    """Build the rollout to imitate for a sample, with its thinking unless chance drops it at this step."""
    chance = random.Random(derive_seed(parts.seed, stage.name, "thought", step, sample.id))
    return parts.processor.build_demonstration(
        parts.processor.build(sample),
        demonstration_text(sample, stage.target_field),
        with_thinking=chance.random() >= stage.drop_thinking_prob,
        loss_on=stage.loss_on,
    )


def select_demonstrations(groups: Sequence[Group]) -> SelectedExperiences:
    """Return all demonstrations as experiences. Their likelihood is the loss, so their advantage is 0."""
    experiences = tuple(Experience(rollout=group.rollouts[0], advantage=0.0) for group in groups)
    rows = tuple((experience,) for experience in experiences)
    return SelectedExperiences(
        groups=tuple(groups), experiences_by_group=rows, experiences=experiences, has_signal=False
    )
