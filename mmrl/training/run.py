"""A run from its first stage to its export: resume, stages, held-out comparison, summary."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from mmrl import checkpoint
from mmrl.algo.group_rewards import add_group_rewards
from mmrl.checkpoint.hf_export import collect_card_facts, write_adapter, write_model
from mmrl.config import Config, LoadedConfig, diff_configs, dump_yaml, read_flat_settings, schema
from mmrl.config.load import cap_steps
from mmrl.config.schema import RlStage, SftStage
from mmrl.distributed.ranks import (
    MediaPlacement,
    RankLostError,
    Ranks,
    SharedDemonstrationLearner,
    SharedRewardScorer,
    measure_across_ranks,
)
from mmrl.distributed.torch_ranks import join_ranks
from mmrl.learner.reference import ReferencePolicy, ReferenceUpdater
from mmrl.log.comparison import compare_rewards, comparison_summary
from mmrl.log.console import Console, null_console
from mmrl.log.logger import NullLogger, RunLogger
from mmrl.log.run_dir import RunDir, check_same_run
from mmrl.log.summary import print_summary
from mmrl.policy.qwen_vl import Policy
from mmrl.ports import Learner, Sampler, SampleSource, StopCriterion
from mmrl.rollout.logprob_check import CheckedSampler, LogprobCheck
from mmrl.training import data_stages, rl, sft
from mmrl.training.async_rollouts import ThreadedAsyncRollouts
from mmrl.training.benchmarks import EvalMoment, TrainingBenchmarks, read_all_benchmark_questions
from mmrl.training.build import RunContext
from mmrl.training.callbacks import AlsoLooking, OpenGate, PeriodicCheckpointer, StopSignal, ValidationGoal
from mmrl.training.health import HealthMonitor, MonitoredLogger, summarize_health
from mmrl.types import EvalRewards, RunInterrupted, Sample, TrainingState


def train(loaded: LoadedConfig, *, steps: int | None = None, run_dir: Path | None = None) -> int:
    """Run every stage of a config, or go on where it stopped; returns the exit code.

    Raises:
        UserError: something the user can put right. A run that had not begun leaves nothing behind.
    """
    loaded = cap_steps(loaded, steps) if steps else loaded
    config = loaded.config
    if run_dir is not None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run_dir)})})
    with join_ranks(config.distributed, force_group=config.deepspeed is not None) as ranks:
        return _train_on_rank(config, loaded.files[0].parent, ranks)


def _train_on_rank(config: Config, base_dir: Path, ranks: Ranks) -> int:
    """As `train`. The first rank alone has the run's directory, and speaks."""
    console = null_console() if ranks.rank else Console()
    place = RunDir(Path(config.run.dir.replace("{name}", config.run.name)))
    stop = StopSignal(console.warn)
    try:
        with stop.interrupt_at_once(), ExitStack() as stack:
            ranks.on_rank0(lambda: stack.enter_context(place.lock()))
            has_begun = ranks.on_rank0(lambda: place.claim(config, console.info))
            if ranks.on_rank0(lambda: has_begun and place.model.exists()):
                console.info("This run is finished; delete its directory or choose another to run it again.")
                ranks.on_rank0(lambda: print_summary(place, console))
                return 0
            fresh = nullcontext() if ranks.rank else _remove_run_dir_on_error(place, keep=has_begun)
            with fresh, ExitStack() as opened:
                questions = ranks.on_rank0(lambda: read_all_benchmark_questions(config, base_dir, place.data))
                world = RunContext(config, base_dir, place, console, ranks)
                for part in (world.scorer, world.tool_runner, world.samplers):
                    opened.enter_context(closing(part))
                benchmarks = TrainingBenchmarks(world, base_dir, questions)
                ranks.on_rank0(lambda: _write_run_info(place, world))
                running = opened.pop_all()
            with running:
                TrainingRun(world, benchmarks, stop).execute()
            ranks.on_rank0(lambda: print_summary(place, console))
    except (RunInterrupted, KeyboardInterrupt, RankLostError) as stopped:
        if isinstance(stopped, RankLostError) and not stop.requested():
            raise  # else the other was only quicker to stop
        saved = "Saved." if isinstance(stopped, RunInterrupted) else "Stopped; the last checkpoint is what is saved."
        console.info(f"{saved} Go on with: {shlex.join(['mmrl', *sys.argv[1:]])}")
        return 128 + (stop.signal or signal.SIGINT)
    return 0


def _write_run_info(run_dir: RunDir, context: RunContext) -> None:
    """Write down what the run is made with."""
    run_dir.write_manifest(context.config, context.samples.digests())
    if context.config.model.from_scratch and not run_dir.processor.exists():
        checkpoint.export_hf_folder(run_dir.processor, context.processor.hf_processor, context.policy.model.config)


@contextmanager
def _remove_run_dir_on_error(run_dir: RunDir, *, keep: bool) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if not keep:
            shutil.rmtree(run_dir.path)
        raise


class TrainingRun:
    """One run, wherever it stands."""

    def __init__(self, context: RunContext, benchmarks: TrainingBenchmarks, stop: StopSignal) -> None:
        self._context, self._benchmarks, self._stop = context, benchmarks, stop
        self._config, self._run_dir, self._console = context.config, context.run_dir, context.console
        self._ranks, self._placement = context.ranks, MediaPlacement()
        self._evaluator = context.build_evaluator()
        every = self._config.logging.save_rollouts_every
        self._logger = (
            NullLogger() if self._ranks.rank else RunLogger(self._run_dir, self._console, save_rollouts_every=every)
        )
        kinds = [stage.kind for stage in self._config.stages]
        self._compared_stage = kinds.index("rl") if "rl" in kinds else len(kinds) - 1 - kinds[::-1].index("sft")
        self._frozen_fingerprint = checkpoint.fingerprint_weights(context.policy.frozen.items())
        self._config_yaml = dump_yaml(self._config)
        options = self._config.checkpoints
        self._checkpoints = checkpoint.CheckpointManager(
            self._run_dir.checkpoints, options, self._console.warn, self._ranks
        )
        self._state, self._optimizer = self._load_checkpoint()
        context.shard_model()
        self._ranks.on_rank0(lambda: self._logger.resume_from(self._state.metrics_bytes))

    def execute(self) -> None:
        """The remaining stages, then the comparison, the summary and the export."""
        with self._checkpoints:
            with self._stop.stop_after_step():
                self._run_stages()
            if "after" not in self._state.eval_rewards:
                self._evaluate_test_samples("after")
                self._save_checkpoint({}, self._state)
        self._finish()

    def _run_stages(self) -> None:
        stages = self._config.stages
        if self._state.stage_index == 0 and isinstance(stages[0], schema.SampleStage):
            self._save_checkpoint(
                {}, self._state
            )  # its table is kept, as from here on there is something to go on from
        for index in range(self._state.stage_index, len(stages)):
            self._run_stage(stages[index])
            self._state = TrainingState(
                stage_index=index + 1, version=self._state.version, eval_rewards=self._state.eval_rewards
            )
            self._save_checkpoint({}, self._state)
            self._checkpoints.wait()
            if self._stop_requested():
                raise RunInterrupted

    def _run_stage(self, stage: SftStage | RlStage | schema.SampleStage | schema.SelectStage) -> None:
        """One stage, from wherever it stands to its end."""
        world, state = self._context, self._state
        match stage:
            case schema.SampleStage():
                data_stages.run_sample_stage(stage, world, self._logger, state, self._stop_requested)
            case schema.SelectStage():
                data_stages.run_select_stage(stage, world, self._logger, state)
            case SftStage() | RlStage():
                with (
                    self._logger.log_stage(stage.name, stage.steps, state.step),
                    world.open_source(stage, state) as source,
                ):
                    if state.stage_index == self._compared_stage:
                        self._evaluate_test_samples("before")
                    self._run_benchmarks("before", state)
                    self._train_stage(stage, source)
                    self._run_benchmarks("after", state)
                why = ", its goal reached" if state.stage_done else ""
                self._console.info(f"Stage {stage.name} ended after {state.step} steps{why}.")
        if isinstance(stage, RlStage) and stage.track_rewards:
            data_stages.write_reward_history(stage, world, state)

    def _stop_requested(self) -> bool:
        """Whether a signal has come, to any rank."""
        return any(self._ranks.all_gather(self._stop.requested()))

    def _load_checkpoint(self) -> tuple[TrainingState, dict[str, Any]]:
        folder = checkpoint.find_latest(self._run_dir.checkpoints, self._console.warn, self._ranks)
        if folder is None:
            return TrainingState(), {}
        check_same_run(folder, diff_configs(read_flat_settings(folder / checkpoint.CONFIG_FILE), self._config))
        weights, divides = self._checkpoint_weights(self._context.policy), self._context.is_zero3
        state, optimizer = checkpoint.load_checkpoint(
            folder, weights=weights, mmap=divides
        )  # it is copied as it is divided
        if state.stage_index < len(self._config.stages):
            name = self._config.stages[state.stage_index].name
            self._console.info(f"Resuming from {folder}: stage {name}, step {state.step}.")
        return state, optimizer

    def _save_checkpoint(self, optimizer: dict[str, Any], state: TrainingState) -> None:
        """Every rank writes its part."""
        state.metrics_bytes = self._logger.metrics.position()
        best = self._config.checkpoints.best
        snapshot = checkpoint.Snapshot(
            weights=checkpoint.CheckpointWeights(
                trained=self._context.policy.local_shard(self._ranks), frozen_fingerprint=self._frozen_fingerprint
            ),
            optimizer=optimizer,
            rng=checkpoint.read_rng_states(),
            state=state,
            config_yaml=self._config_yaml,
            best_metric=self._logger.last_value(best.metric) if best else None,
        )
        self._checkpoints.save(snapshot, before_write=self._logger.metrics.sync)

    def _train_stage(self, stage: SftStage | RlStage, source: SampleSource) -> None:
        world, state = self._context, self._state
        engine, reference = world.build_engine(stage), self._build_reference(stage)
        if self._optimizer:
            engine.load_state(self._optimizer)
            self._optimizer = {}
        learner: Learner = world.samplers.sleep_during_learning(
            world.build_learner(stage, engine, reference, self._placement)
        )
        if isinstance(stage, RlStage) and reference is not None:
            learner = ReferenceUpdater(learner, reference, engine, stage.reference)
        keeper = PeriodicCheckpointer(
            lambda state: self._save_checkpoint({**engine.state(), **(reference.state() if reference else {})}, state),
            self._checkpoints,
            self._stop_requested,
            every=self._config.checkpoints.every,
        )
        if isinstance(stage, SftStage):
            parts = sft.SftComponents(
                source=source,
                prompt_builder=world.processor,
                learner=SharedDemonstrationLearner(
                    learner=learner, ranks=self._ranks, placement=self._placement, requested=stage.batch_size
                ),
                logger=self._logger,
                stop_criterion=self._build_stop_criterion(stage),
                checkpointer=keeper,
                tools=world.build_demonstration_tools(stage),
            )
            sft.run_sft_stage(sft.build_sft_settings(stage, self._config.run.seed), parts, state)
            return
        sampler = self._build_sampler(stage)
        program = world.build_rollout_pipeline(stage, sampler)
        watch = HealthMonitor(stage.health, self._console.warn)
        rl.run_rl_stage(
            self._build_rl_settings(stage),
            rl.RlComponents(
                source=source,
                prompt_builder=world.processor,
                rollout_pipeline=program,
                sampler=sampler,
                scorer=SharedRewardScorer(scorer=world.scorer, ranks=self._ranks, placement=self._placement),
                selector=world.build_selector(stage, self._placement),
                learner=learner,
                logger=MonitoredLogger(self._logger, watch),
                stop_criterion=self._build_stop_criterion(stage),
                checkpointer=keeper,
                async_rollouts=ThreadedAsyncRollouts(pipeline=program, executor=world.samplers.rollout_thread)
                if stage.async_rollouts
                else None,
            ),
            state,
        )
        self._console.info(summarize_health(watch))

    def _build_sampler(self, stage: RlStage) -> Sampler:
        """Who draws the stage's rollouts, with the weights of this moment, and probed."""
        world, state, options = self._context, self._state, self._config.rollout
        sampler = world.samplers.make_sampler(
            self._config.run.seed, stage.name, version=state.version, concurrent=stage.async_rollouts
        )
        world.samplers.sync_weights(state.version)
        if options.engine == "hf" and not options.logprob_check.every:
            return sampler
        parity = LogprobCheck(
            sampler,
            world.policy,
            world.processor,
            samples=world.samples.train,
            sampling_params=self._context.build_sampling_params(stage.sampling),
            options=options.logprob_check,
            warn=self._console.warn,
        )
        gaps = parity.measure(state.version)
        if state.step == 0:
            self._logger.log_metrics(state, gaps)
        return CheckedSampler(
            sampler, parity, partial(self._logger.log_metrics, state), check_every=options.logprob_check.every
        )

    def _build_rl_settings(self, stage: RlStage) -> rl.RlSettings:
        return rl.RlSettings(
            num_steps=stage.steps,
            prompts_per_round=stage.max_prompts_in_flight,
            add_group_rewards=partial(add_group_rewards, group_rewards=self._context.group_rewards),
            max_steps_without_signal=stage.max_steps_without_signal,
            max_nonfinite_steps=stage.max_nonfinite_steps,
        )

    def _build_stop_criterion(self, stage: SftStage | RlStage) -> StopCriterion:
        gate: StopCriterion = OpenGate()
        if stage.validation is not None:
            look = partial(self._evaluate, self._context.samples.validation)
            gate = ValidationGoal(look, self._log_validation, stage.validation)
        return AlsoLooking(partial(self._run_benchmarks, "step"), gate)

    def _run_benchmarks(self, when: EvalMoment, state: TrainingState) -> None:
        """The benchmarks that are due."""
        if metrics := self._benchmarks.evaluate_due(state, when):
            self._logger.log_metrics(state, metrics)

    def _log_validation(
        self, state: TrainingState, means: Mapping[str, float], rollout_metrics: Mapping[str, float]
    ) -> None:
        self._logger.log_metrics(
            state, {f"validation/{name}": value for name, value in {**means, **rollout_metrics}.items()}
        )
        rewards = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
        self._console.info(f"validation after {state.step} steps: {rewards}")

    def _build_reference(self, stage: SftStage | RlStage) -> ReferencePolicy | None:
        """What the KL penalty measures from. One that never moves is kept on disk, one that does in each checkpoint."""
        if isinstance(stage, SftStage) or not stage.loss.kl.coef:
            return None
        policy, options = self._context.policy, stage.reference
        unchanged = self._config.model.lora is not None and not any(
            isinstance(earlier, SftStage | RlStage) for earlier in self._config.stages[: self._state.stage_index]
        )
        if options.init_from == "base" or (options.update == "never" and unchanged):
            return ReferencePolicy(
                policy, options, initial_copy=policy.without_adapter()
            )  # a new adapter has changed nothing
        reference = ReferencePolicy(policy, options, ranks=self._ranks)
        folder = self._run_dir.reference_weights / stage.name
        if not reference.is_frozen:
            if self._optimizer:
                reference.load_state(self._optimizer)
        elif self._state.step == 0:
            self._ranks.on_rank0(lambda: checkpoint.save_weights(folder, self._checkpoint_weights(reference.policy)))
        else:
            checkpoint.load_weights(folder, self._checkpoint_weights(reference.policy))
        return reference

    def _checkpoint_weights(self, policy: Policy) -> checkpoint.CheckpointWeights:
        return checkpoint.CheckpointWeights(trained=policy.trained, frozen_fingerprint=self._frozen_fingerprint)

    def _evaluate(self, samples: tuple[Sample, ...]) -> EvalRewards:
        self._context.samplers.sync_weights(self._state.version)
        with self._context.samplers.gather_for_sampling():
            return measure_across_ranks(partial(self._evaluator.evaluate, step=self._state.step), samples, self._ranks)

    def _evaluate_test_samples(self, when: str) -> None:
        """Held-out rewards on the test samples, kept for the comparison."""
        if when in self._state.eval_rewards or not self._context.samples.test:
            return
        rewards, counts = self._evaluate(self._context.samples.test)
        self._state.eval_rewards[when] = {task: dict(of) for task, of in rewards.items()}
        means = {task: fmean(of.values()) for task, of in rewards.items()}
        self._logger.log_metrics(self._state, {f"test/{name}": value for name, value in {**means, **counts}.items()})

    def _finish(self) -> None:
        self._context.unwrap_model()
        self._ranks.on_rank0(self._write_results)
        self._logger.close()

    def _write_results(self) -> None:
        best = self._config.checkpoints.best
        if best and self._logger.last_value(best.metric) is None:
            self._console.warn(
                f"checkpoints.best: this run recorded no {best.metric!r}; its metrics.jsonl has the names"
            )
        evals = self._state.eval_rewards
        rows = compare_rewards(evals["before"], evals["after"]) if evals.keys() >= {"before", "after"} else []
        since = self._config.stages[self._compared_stage].name
        self._run_dir.write_summary(
            {"name": self._config.run.name, "seed": self._config.run.seed, "since": since, **comparison_summary(rows)}
        )
        self._export()

    def _export(self) -> None:
        """The model as a Hugging Face folder; before it an adapter alone, which is merged into the model."""
        world = self._context
        facts = collect_card_facts(
            self._run_dir, self._config, self._state, str(checkpoint.StepId(self._state.stage_index, 0))
        )
        if world.adapter is not None:
            write_adapter(self._run_dir.adapter, world.adapter, facts)
            world.adapter.merge()
        write_model(self._run_dir.model, world.model_bundle, facts)
