"""Stages that make data: how they meet the machinery of a run."""

from __future__ import annotations

from collections.abc import Callable

from mmrl.config.schema import RlStage, SampleStage, SelectStage
from mmrl.data.stage_tables import write_history_table
from mmrl.distributed.ranks import MediaPlacement, SharedRewardScorer
from mmrl.log.logger import NullLogger, RunLogger
from mmrl.training import sample, select
from mmrl.training.build import RunContext
from mmrl.types import TrainingState


def run_sample_stage(
    stage: SampleStage,
    context: RunContext,
    logger: RunLogger | NullLogger,
    state: TrainingState,
    stop_requested: Callable[[], bool],
) -> None:
    """Write the rollouts of the policy as it is; raises as `mmrl.training.sample.sample_rollouts`."""
    asked = context.stage_data.stage_samples(stage)
    asked = asked if stage.steps is None else asked[: stage.steps * stage.prompts_per_step]
    plan = sample.SampleSettings(
        samples=asked,
        prompts_per_step=stage.prompts_per_step,
        group_size=stage.group_size,
        table_path=context.run_dir.outputs / f"{stage.name}.jsonl",
    )
    sampler = context.samplers.make_sampler(context.config.run.seed, stage.name, version=state.version)
    context.samplers.sync_weights(state.version)
    parts = sample.SampleComponents(
        prompt_builder=context.processor,
        rollout_pipeline=context.build_rollout_pipeline(stage, sampler),
        scorer=SharedRewardScorer(scorer=context.scorer, ranks=context.ranks, placement=MediaPlacement()),
        ranks=context.ranks,
        stop_requested=stop_requested,
    )
    done = context.ranks.on_rank0(lambda: sample.count_finished_steps(plan))
    with logger.log_stage(stage.name, plan.num_steps, done):
        for step in sample.sample_rollouts(plan, parts):
            logger.log_progress(step)
        logger.log_metrics(state, context.ranks.on_rank0(lambda: sample.compute_table_metrics(plan.table_path)))


def write_reward_history(stage: RlStage, context: RunContext, state: TrainingState) -> None:
    """Write how the stage's samples fared; raises UserError where that cannot be written."""
    table, samples = context.run_dir.outputs / f"{stage.name}.jsonl", context.stage_data.stage_samples(stage)
    context.ranks.on_rank0(lambda: write_history_table(table, samples, state.reward_history))


def run_select_stage(
    stage: SelectStage, context: RunContext, logger: RunLogger | NullLogger, state: TrainingState
) -> None:
    """Write what later stages train on; raises as `mmrl.training.select.select_samples`."""
    found = context.ranks.on_rank0(lambda: select.select_samples(stage, context.run_dir.outputs))
    context.console.info(
        f"Stage {stage.name} kept {found.kept} of {found.total} samples of {stage.from_stage}, in {found.rows} rows; their "
        f"{stage.metric} is {found.median:g} in the middle."
    )
    with logger.log_stage(stage.name, 1):
        logger.log_metrics(state, {f"select/{name}": float(value) for name, value in found._asdict().items()})
