"""One supervised stage of a run: builds its parts and runs the loop of `mmrl.training.sft`."""

from __future__ import annotations

from mmrl.config.schema import SftStage
from mmrl.distributed.ranks import MediaOwners
from mmrl.rollout.tools.executor import DemonstrationTools
from mmrl.training.build import RunContext
from mmrl.training.checkpoints import OptimizerState
from mmrl.training.sft import SftComponents, build_sft_settings, run_sft_stage
from mmrl.training.stage import StageServices, build_callbacks, build_learner, build_optimizer, open_stage
from mmrl.types import TrainingState


def train_sft_stage(
    stage: SftStage, services: StageServices, state: TrainingState, resumed_optimizer: OptimizerState
) -> None:
    """Train a supervised stage from `state.step` to its end; `resumed_optimizer` is that of its last checkpoint."""
    context, media_owners = services.context, MediaOwners()
    with open_stage(stage, services, state) as source:
        optimizer = build_optimizer(stage, context, services.sharded_model)
        if resumed_optimizer:
            optimizer.load_state(resumed_optimizer)
        components = SftComponents(
            source=source,
            processor=context.processor,
            sleep_engine=context.samplers.sleep,
            learner=build_learner(stage, context, optimizer, None, media_owners),
            callbacks=build_callbacks(stage, services, optimizer.state, health=None),
            ranks=context.ranks,
            media_owners=media_owners,
            tools=build_demonstration_tools(stage, context),
        )
        run_sft_stage(build_sft_settings(stage, context.config.run.seed), components, state)


def build_demonstration_tools(stage: SftStage, context: RunContext) -> DemonstrationTools | None:
    """Return what answers the tool calls in a stage's demonstrations, or None if the stage has no tools."""
    if not stage.rollout_steps:
        return None
    executor = context.tool_runner.make_executor(stage.rollout_steps[0], context.processor)
    return DemonstrationTools(executor=executor)
