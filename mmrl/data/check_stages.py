"""Checks, before the first step, that every stage has the samples and demonstrations that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mmrl.answer import ResponseFormat
from mmrl.config import Config
from mmrl.config.schema import RlStage, SftStage, matches_conditions
from mmrl.data.demonstrations import demonstration_text
from mmrl.types import Sample, Target, UserError


def check_stages_have_samples(config: Config, samples: Sequence[Sample]) -> None:
    """Check the stages that train on the training samples themselves, rather than on another stage's.

    Raises:
        UserError: as `check_stage_has_samples`.
    """
    for stage in config.training_stages:
        if stage.from_stage is None:
            check_stage_has_samples(stage, sum(matches_conditions(stage.when, sample) for sample in samples))


def check_stage_has_samples(stage: SftStage | RlStage, count: int) -> None:
    """Check that a stage has samples, and an RL stage enough of them for a step to take each at most once.

    Raises:
        UserError: `count`, the number of samples that the stage may use, is too small.
    """
    owner = f"stage {stage.from_stage!r} kept {count} of its" if stage.from_stage else f"there are {count}"
    owner += " (see its `when`)" if stage.when else ""
    if not count:
        raise UserError(f"stage {stage.name!r} has nothing to train on: {owner} samples")
    if not isinstance(stage, RlStage):
        return
    needed = max_prompts_per_step(stage)
    # Draws derive from step and sample id, so a sample taken twice would get the same rollouts twice.
    if needed > max(count, stage.repeat_samples_to or 0):
        remedy = "set repeat_samples_to, or lower prompts_per_step"
        if stage.dynamic_sampling:
            remedy += " or dynamic_sampling.max_rounds"
        if stage.max_prompts_in_flight > stage.prompts_per_step:
            remedy += " or oversampling"
        raise UserError(
            f"stage {stage.name!r} needs {needed} prompts a step and {owner} samples: one would get the same rollouts "
            f"twice; {remedy}"
        )


def max_prompts_per_step(stage: RlStage) -> int:
    """Return how many samples a step may take, in all its sampling rounds together."""
    rounds = stage.dynamic_sampling.max_rounds if stage.dynamic_sampling else 1
    return stage.max_prompts_in_flight * rounds


def check_demonstrations(config: Config, samples: Iterable[Sample], response_format: ResponseFormat) -> None:
    """Check that every sample of an sft stage has a demonstration that can be written in the response format.

    Raises:
        UserError: a sample lacks its `target_field`, or the format cannot express it.
    """
    stages = [stage for stage in config.stages if isinstance(stage, SftStage) and stage.from_stage is None]
    for sample in samples:
        target_fields = {stage.target_field for stage in stages if matches_conditions(stage.when, sample)}
        for target_field in sorted(target_fields):
            demonstration = demonstration_text(sample, target_field)
            if not isinstance(demonstration, Target):
                continue
            try:
                response_format.render(demonstration, sample.thinking)
            except UserError as error:
                raise UserError(f"sample {sample.id}: {error}") from error
