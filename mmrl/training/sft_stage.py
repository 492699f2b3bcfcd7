"""One supervised stage of a run: builds its parts and runs the loop of `mmrl.training.sft`."""

from __future__ import annotations

from mmrl.config.schema import EnvironmentConfig, SftStage, ToolsConfig
from mmrl.protocols import DemonstrationCompleter
from mmrl.rollout.tools.executor import DemonstrationTools
from mmrl.training.build import RunComponents
from mmrl.training.sft import SftParts, train_sft
from mmrl.training.stage import StageServices, build_callbacks, build_learner, build_optimizer, open_stage
from mmrl.types import TrainingState
from mmrl.utils.seeds import derive_seed


def run_sft_stage(stage: SftStage, services: StageServices, state: TrainingState) -> None:
    """Train a supervised stage to its end."""
    run = services.run
    with open_stage(stage, services, state) as source:
        optimizer = build_optimizer(stage, run, services.sharded_model)
        loaded = services.checkpoints.take_optimizer_state()
        if loaded:
            optimizer.load_state(loaded)
        del loaded  # a copy that would stay in memory for the whole stage
        learner = build_learner(stage, run, optimizer, None)
        parts = SftParts(
            source=source,
            processor=run.processor,
            engine=run.engine,
            learner=learner,
            callbacks=build_callbacks(stage, services, learner, optimizer.state),
            seed=run.config.run.seed,
            ranks=run.ranks,
            completer=build_completer(stage, run),
            activity=run.console.activity,
        )
        train_sft(stage, parts, state)


def build_completer(stage: SftStage, run: RunComponents) -> DemonstrationCompleter | None:
    """Return the runner of tool calls in demonstrations, or the player of the environment; None without either."""
    match stage.rollout_steps:
        case (ToolsConfig() as options,):
            return DemonstrationTools(executor=run.tool_runner.make_executor(options, run.processor))
        case (EnvironmentConfig() as options,):
            from mmrl.rollout.steps.environment import make_environment_step

            seed = derive_seed(run.config.run.seed, stage.name)
            return make_environment_step(options, run.tool_runner, run.processor, seed=seed)
    return None
