"""Parts that RL and supervised stages share: samples, optimizer, learner, and the callbacks after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mmrl.config.schema import LossConfig, RlStage, SftStage
from mmrl.learner.learner import LearnerConfig, PolicyLearner
from mmrl.learner.optimizer import Optimizer
from mmrl.learner.optimizer_torch import TorchOptimizer
from mmrl.log.logger import MetricsLogger
from mmrl.policy.policy import PolicyModel
from mmrl.protocols import Learner, SampleSource
from mmrl.training.build import RunComponents
from mmrl.training.callbacks import (
    BenchmarkRunner,
    Callback,
    LogprobChecker,
    PeriodicCheckpointer,
    RolloutRecorder,
    StepLogger,
    Validation,
)
from mmrl.training.health import FailedStepCounter, FailedStepLimit, HealthMonitor
from mmrl.training.held_out import HeldOutEvaluation, first_compared_stage
from mmrl.training.run_checkpoints import OptimizerState, RunCheckpoints
from mmrl.types import TrainingState

if TYPE_CHECKING:
    from mmrl.learner.optimizer_deepspeed import DeepspeedModel
    from mmrl.rollout.logprob_check import LogprobCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class StageServices:
    """Logger, checkpoints and measurements that the stages of a run use besides its `RunComponents`."""

    run: RunComponents
    sharded_model: DeepspeedModel | None  # the policy's model, managed by DeepSpeed; None without `deepspeed`
    logger: MetricsLogger
    checkpoints: RunCheckpoints
    held_out: HeldOutEvaluation
    benchmarks: BenchmarkRunner
    user_callbacks: Sequence[Callback]
    agree_to_stop: Callable[[], bool]  # True on all ranks once a signal has reached one of them; collective


@contextmanager
def open_stage(stage: SftStage | RlStage, services: StageServices, state: TrainingState) -> Iterator[SampleSource]:
    """Freeze components as the stage says, and yield its samples; run due measurements before and after the block."""
    run = services.run
    with (
        run.policy.freeze(run.config.model.with_freeze(stage.freeze).freeze),
        services.logger.log_stage(stage.name, stage.steps, state.step),
        # The order of the samples may depend on rewards recorded in `state`.
        run.stage_data.open_source(stage, state, run.console, run.ranks) as source,
    ):
        if state.stage_index == first_compared_stage(run.config):
            services.held_out.measure_test_samples(state, "before")
        services.benchmarks.run(state, "before")
        yield source
        services.benchmarks.run(state, "after")
    reason = ", its goal reached" if state.stage_done else ""
    run.console.info(f"Stage {stage.name} ended after {state.step} steps{reason}.")


def build_optimizer(stage: SftStage | RlStage, run: RunComponents, sharded_model: DeepspeedModel | None) -> Optimizer:
    """Return a new optimizer for a stage."""
    if sharded_model is not None:
        from mmrl.learner.optimizer_deepspeed import DeepspeedOptimizer

        return DeepspeedOptimizer(sharded_model, stage.optimizer)
    return TorchOptimizer(run.policy.trained_by_component, stage.optimizer, run.ranks)


def build_learner(
    stage: SftStage | RlStage, run: RunComponents, optimizer: Optimizer, reference: PolicyModel | None
) -> Learner:
    """Return the learner of a stage. Supervised stages have one epoch and one mini-batch, and no policy loss."""
    learner_config = LearnerConfig(
        loss=stage.loss if isinstance(stage, RlStage) else LossConfig(),
        optimizer=stage.optimizer,
        total_steps=stage.steps,
        micro_batch_groups=stage.micro_batch_groups,
        micro_batch_tokens=stage.micro_batch_tokens,
        ppo_epochs=stage.ppo_epochs,
        num_mini_batches=stage.num_mini_batches,
        shared_prefix=stage.shared_prefix != "off" and run.policy.supports_shared_prefix,
        pad_id=run.processor.tokenizer.eos_token_id,
        policy_loss_fn=run.functions.policy_losses.get(stage.name),
    )
    return PolicyLearner(
        run.policy,
        run.processor,
        optimizer,
        learner_config,
        reference,
        ranks=run.ranks,
        activity=run.console.activity,
    )


def build_callbacks(
    stage: SftStage | RlStage,
    services: StageServices,
    learner: Learner,
    save_optimizer: Callable[[], OptimizerState],
    health: HealthMonitor | None = None,
    logprob_check: LogprobCheck | None = None,
) -> list[Callback]:
    """Return the callbacks of each step, in order. `save_optimizer` returns the optimizer state of a checkpoint."""
    config, console, logger = services.run.config, services.run.console, services.logger
    is_rl = isinstance(stage, RlStage)

    def save(state: TrainingState) -> None:
        with console.activity.during("save"):
            services.checkpoints.save(state, save_optimizer())

    # The counter comes first: the logger records all rollouts of a step when `nonfinite_steps` is above 0.
    callbacks: list[Callback] = [FailedStepCounter(count_steps_without_signal=is_rl)]
    # The logger precedes all callbacks that may end the run, so that the last step of a failed run is in its files. It
    # calls the user's callbacks itself, logs the metrics that they return, and logs the step even if one raises.
    options, ranks = config.logging.rollouts, services.run.ranks
    recorder = RolloutRecorder(options=options, logger=logger, learner=learner, ranks=ranks, stage=stage.name)
    callbacks.append(
        StepLogger(
            logger,
            recorder,
            services.user_callbacks,
            async_rollouts=isinstance(stage, RlStage) and stage.async_rollouts,
            only_failed_rollouts=not is_rl,
        )
    )
    if health is not None:
        callbacks.append(health)
    if logprob_check is not None:
        callbacks.append(LogprobChecker(logprob_check, logger.log_metrics))
    max_steps = stage.max_steps_without_signal if isinstance(stage, RlStage) else None
    limit = FailedStepLimit(max_nonfinite_steps=stage.max_nonfinite_steps, max_steps_without_signal=max_steps)
    callbacks.append(limit)
    if config.evaluation.benchmarks:
        callbacks.append(services.benchmarks)
    if stage.validation is not None and services.run.samples.validation:
        measure = partial(services.held_out.measure, services.run.samples.validation)
        record = recorder.record_validation
        callbacks.append(Validation(measure, stage.validation, logger.log_metrics, record, console.info))
    # The checkpoint comes last: it holds decisions of the other callbacks (`stage_done`) and the size of their logs.
    every = config.checkpoints.every
    callbacks.append(PeriodicCheckpointer(save, services.checkpoints.manager, services.agree_to_stop, every=every))
    return callbacks
