"""A run from its first stage to its export: resume, stages, held-out comparison, summary."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from mmrl import checkpoint
from mmrl.algo.group_rewards import add_group_rewards
from mmrl.checkpoint.hf_export import collect_card_facts, write_adapter, write_model
from mmrl.config import Config, LoadedConfig, diff_configs, dump_yaml, read_flat_settings
from mmrl.config.schema import RlStage, SampleStage, SelectStage, SftStage
from mmrl.data.stage_tables import write_history_table
from mmrl.distributed.ranks import MediaPlacement, RankLostError, Ranks
from mmrl.distributed.sharing import SharedDemonstrationLearner, measure_across_ranks
from mmrl.distributed.torch_ranks import join_ranks
from mmrl.learner.reference import ReferencePolicy
from mmrl.log.comparison import compare_rewards, comparison_summary, print_summary
from mmrl.log.console import Console, null_console
from mmrl.log.library_messages import log_library_messages
from mmrl.log.logger import NullLogger, RunLogger
from mmrl.log.run_dir import RunDir, check_same_run, run_dir_of
from mmrl.policy.policy import Policy
from mmrl.ports import Learner, Sampler, SampleSource
from mmrl.rollout.logprob_check import LogprobCheck
from mmrl.training.async_rollouts import AsyncRollouts, describe_lengthening, run_async_rl_stage
from mmrl.training.benchmarks import TrainingBenchmarks, digest_questions, read_all_benchmark_questions
from mmrl.training.build import RunContext, StageEngine
from mmrl.training.callbacks import (
    BenchmarkRunner,
    Callback,
    PeriodicCheckpointer,
    StepLogger,
    Validation,
    load_callbacks,
)
from mmrl.training.early_checks import FINISHED_MESSAGE, check_functions, effective_config
from mmrl.training.health import FailedStepCounter, FailedStepLimit, HealthMonitor
from mmrl.training.rl import RlComponents, RlSettings, run_rl_stage
from mmrl.training.sample import run_sample_stage
from mmrl.training.select import run_select_stage
from mmrl.training.sft import SftComponents, build_sft_settings, run_sft_stage
from mmrl.training.stop_signal import StopSignal
from mmrl.types import EvalRewards, RunInterrupted, Sample, TrainingState


def train(
    loaded: LoadedConfig,
    *,
    steps: int | None = None,
    run_dir: Path | None = None,
    resume_command: str = "the same call",
) -> int:
    """Run every stage of a config, or continue where it stopped; return the exit code.

    Args:
        loaded: The config and the files it came from.
        steps: Upper bound on the steps of each stage.
        run_dir: Replaces `run.dir` of the config.
        resume_command: Says how to continue an interrupted run.

    Raises:
        UserError: something the user can fix. A run that had not begun leaves nothing behind.
    """
    config = effective_config(loaded, steps=steps, run_dir=run_dir)
    with join_ranks(config.distributed, force_group=config.deepspeed is not None) as ranks:
        return _train_on_rank(config, loaded.files[0].parent, loaded.warnings, ranks, resume_command)


def _train_on_rank(config: Config, base_dir: Path, warnings: Sequence[str], ranks: Ranks, resume_command: str) -> int:
    """Do the part of `train` that belongs to this rank. Rank 0 alone writes to the run directory and the console."""
    console = null_console() if ranks.rank else Console()
    run_dir = run_dir_of(config)
    stop = StopSignal(console.warn)
    try:
        # SIGTERM too should unwind and clean up, as Ctrl-C does.
        with stop.handle(signal.SIGTERM, finish_step=False), ExitStack() as stack:
            ranks.on_rank0(partial(stack.enter_context, run_dir.lock()))
            has_begun = ranks.on_rank0(partial(run_dir.claim, config, console.info))
            if has_begun and ranks.on_rank0(run_dir.is_finished):
                console.info(FINISHED_MESSAGE)
                ranks.on_rank0(partial(print_summary, run_dir, console))
                return 0
            for warning in warnings:
                console.warn(warning)
            stack.enter_context(log_library_messages(run_dir.log, rank=ranks.rank))
            cleanup = nullcontext() if ranks.rank else run_dir.remove_on_error(keep=has_begun)
            with cleanup, ExitStack() as opened:
                # What can fail early comes first. Where another launcher started the ranks, nothing has been checked.
                ranks.on_rank0(partial(check_functions, config, base_dir))
                questions = ranks.on_rank0(partial(read_all_benchmark_questions, config, base_dir, run_dir.data))
                context = RunContext(config, base_dir, run_dir, console, ranks)
                for part in (context.scorer, context.tool_runner, context.samplers):
                    opened.enter_context(closing(part))
                for term in context.group_rewards:
                    opened.callback(term.close)
                benchmarks = TrainingBenchmarks(context, base_dir, questions)
                user_callbacks = load_callbacks(config.callbacks, context, base_dir)
                ranks.on_rank0(partial(_write_run_info, run_dir, context, digest_questions(config, questions)))
                running = opened.pop_all()
            with running:
                TrainingRun(context, benchmarks, user_callbacks, stop).execute()
            ranks.on_rank0(partial(print_summary, run_dir, console))
    except (RunInterrupted, KeyboardInterrupt, RankLostError) as stopped:
        # A signal reaches all ranks, and those that stop first are lost to the others.
        if isinstance(stopped, RankLostError) and stop.received is None:
            raise
        saved = "Saved." if isinstance(stopped, RunInterrupted) else "Stopped; the last checkpoint is what is saved."
        console.info(f"{saved} Continue with: {resume_command}")
        # The exit code of a shell for a process that a signal ended.
        return 128 + (stop.received or signal.SIGINT)
    return 0


def _write_run_info(run_dir: RunDir, context: RunContext, benchmarks: Mapping[str, str]) -> None:
    """Write the manifest, the record of data and `benchmarks`, and for a model made from scratch its processor."""
    context.data_record.check_benchmarks(benchmarks)
    run_dir.write_manifest(context.config, context.samples.content_hashes(), context.data_record.differences)
    context.data_record.save()
    if context.config.model.from_scratch and not run_dir.processor.exists():
        checkpoint.export_hf_folder(run_dir.processor, context.processor.hf_processor, context.policy.model.config)


class TrainingRun:
    """One run on one rank: its state, and the stages that are left."""

    def __init__(
        self, context: RunContext, benchmarks: TrainingBenchmarks, user_callbacks: Sequence[Callback], stop: StopSignal
    ) -> None:
        """Load the latest checkpoint, if there is one.

        Raises:
            UserError: the checkpoint belongs to another config, or metrics.jsonl was changed since.
        """
        self._context, self._user_callbacks, self._stop = context, user_callbacks, stop
        self._config, self._run_dir, self._console = context.config, context.run_dir, context.console
        self._ranks, self._placement = context.ranks, MediaPlacement()
        self._measure_rewards = context.build_evaluator()
        # Rank 0 alone writes; the others log into nothing, so that all make the same calls.
        self._logger: RunLogger | NullLogger = NullLogger()
        if self._ranks.rank == 0:
            save_every = self._config.logging.save_rollouts_every
            self._logger = RunLogger(self._run_dir, self._console, save_rollouts_every=save_every)
        self._benchmarks = BenchmarkRunner(benchmarks.evaluate_due, self._logger.log_metrics)
        # Held-out reward is compared between the start of the first RL stage, or else the last SFT stage, and the end.
        kinds = [stage.kind for stage in self._config.stages]
        self._compared_stage = kinds.index("rl") if "rl" in kinds else len(kinds) - 1 - kinds[::-1].index("sft")
        self._frozen_fingerprint = checkpoint.fingerprint_weights(context.policy.frozen.items())
        self._config_yaml = dump_yaml(self._config)
        self._checkpoints = checkpoint.CheckpointManager(
            self._run_dir.checkpoints, self._config.checkpoints, self._console.warn, self._ranks
        )
        self._state, self._optimizer = self._load_checkpoint()
        self._ranks.on_rank0(partial(self._run_dir.reopen, self._config))
        context.shard_model()
        self._ranks.on_rank0(partial(self._logger.resume_from, self._state.metrics_bytes))

    def execute(self) -> None:
        """Run the stages that are left, then compare, summarize and export."""
        with self._checkpoints:
            with self._stop.handle(signal.SIGINT, signal.SIGTERM, finish_step=True):
                self._run_stages()
            if "after" not in self._state.eval_rewards:
                self._evaluate_test_samples("after")
                self._save_checkpoint({}, self._state)
        self._context.unwrap_model()
        self._ranks.on_rank0(self._write_results)
        self._logger.close()

    def _run_stages(self) -> None:
        stages = self._config.stages
        if self._state.stage_index == 0 and isinstance(stages[0], SampleStage):
            # A run without a checkpoint starts over and removes its files, the table of this stage among them.
            self._save_checkpoint({}, self._state)
        for index in range(self._state.stage_index, len(stages)):
            self._run_stage(stages[index])
            self._state = TrainingState(
                stage_index=index + 1, version=self._state.version, eval_rewards=self._state.eval_rewards
            )
            self._save_checkpoint({}, self._state)
            # A stage that is over must be on the disk before the next one begins.
            self._checkpoints.wait()
            if self._stop_requested():
                raise RunInterrupted

    def _run_stage(self, stage: SftStage | RlStage | SampleStage | SelectStage) -> None:
        """Run one stage from `state.step` to its end."""
        context, state = self._context, self._state
        match stage:
            case SampleStage():
                run_sample_stage(stage, context, self._logger, state, self._stop_requested)
            case SelectStage():
                run_select_stage(stage, context, self._logger, state)
            case SftStage() | RlStage():
                with (
                    context.policy.freeze(self._config.model.with_freeze(stage.freeze).freeze),
                    self._logger.log_stage(stage.name, stage.steps, state.step),
                    # The order of the samples may depend on rewards recorded in `state`.
                    context.stage_data.open_source(
                        stage, state, context.worker_encoder, context.console, context.ranks
                    ) as source,
                ):
                    if state.stage_index == self._compared_stage:
                        self._evaluate_test_samples("before")
                    self._benchmarks.run(state, "before")
                    self._train_stage(stage, source)
                    self._benchmarks.run(state, "after")
                reason = ", its goal reached" if state.stage_done else ""
                self._console.info(f"Stage {stage.name} ended after {state.step} steps{reason}.")
        if isinstance(stage, RlStage) and stage.track_rewards:
            # What each sample of the stage earned, for stages of kind `select`.
            table_path, samples = self._run_dir.outputs / f"{stage.name}.jsonl", context.stage_data.stage_samples(stage)
            self._ranks.on_rank0(partial(write_history_table, table_path, samples, state.reward_history))

    def _train_stage(self, stage: SftStage | RlStage, source: SampleSource) -> None:
        context, state = self._context, self._state
        engine, reference = context.build_engine(stage), self._build_reference(stage)
        # The checkpoint's optimizer belongs to the stage that was interrupted; later stages begin with a new one.
        if self._optimizer:
            engine.load_state(self._optimizer)
            self._optimizer = {}
        learner = context.samplers.sleep_during_learning(
            context.build_learner(stage, engine, reference.policy if reference else None, self._placement)
        )
        health = HealthMonitor(stage.health, self._console.warn) if isinstance(stage, RlStage) else None
        callbacks = self._build_callbacks(stage, engine, reference, health)
        if isinstance(stage, SftStage):
            if self._ranks.size > 1:
                learner = SharedDemonstrationLearner(learner=learner, ranks=self._ranks, placement=self._placement)
            components = SftComponents(
                source=source,
                prompt_builder=context.processor,
                learner=learner,
                callbacks=callbacks,
                ranks=self._ranks,
                tools=context.build_demonstration_tools(stage),
            )
            run_sft_stage(build_sft_settings(stage, self._config.run.seed), components, state)
            return
        self._train_rl_stage(stage, source, learner, callbacks, engine=engine, reference=reference)
        if health is not None:
            self._console.info(health.summary())

    def _build_callbacks(
        self,
        stage: SftStage | RlStage,
        engine: StageEngine,
        reference: ReferencePolicy | None,
        health: HealthMonitor | None,
    ) -> list[Callback]:
        """Return what happens after each step, in order."""
        is_rl = isinstance(stage, RlStage)

        def save(state: TrainingState) -> None:
            self._save_checkpoint({**engine.state(), **(reference.state() if reference else {})}, state)

        # The count comes first: the logger saves the rollouts of a step that extends it.
        callbacks: list[Callback] = [FailedStepCounter(count_steps_without_signal=is_rl)]
        # The logger precedes all that may end the run, so that the last step of a failed run is in its files. It calls
        # the user's callbacks itself: it logs what they return, and logs the step even if one of them raises.
        callbacks.append(StepLogger(self._logger, self._user_callbacks, only_failed_rollouts=not is_rl))
        if health is not None:
            callbacks.append(health)
        max_steps = stage.max_steps_without_signal if isinstance(stage, RlStage) else None
        limit = FailedStepLimit(max_nonfinite_steps=stage.max_nonfinite_steps, max_steps_without_signal=max_steps)
        callbacks.append(limit)
        if self._config.evaluation.benchmarks:
            callbacks.append(self._benchmarks)
        if stage.validation is not None:
            measure = partial(self._evaluate, self._context.samples.validation)
            callbacks.append(Validation(measure, stage.validation, self._logger.log_metrics, self._console.info))
        # The checkpoint comes last: it holds what the others decided (`stage_done`) and the end of what they logged.
        every = self._config.checkpoints.every
        callbacks.append(PeriodicCheckpointer(save, self._checkpoints, self._stop_requested, every=every))
        return callbacks

    def _train_rl_stage(
        self,
        stage: RlStage,
        source: SampleSource,
        learner: Learner,
        callbacks: Sequence[Callback],
        *,
        engine: StageEngine,
        reference: ReferencePolicy | None,
    ) -> None:
        context, version = self._context, self._state.version
        update_reference: Callable[[int], dict[str, float]] | None = None
        if reference is not None and not reference.is_frozen:
            update_reference = partial(reference.update, reset_optimizer=engine.reset)
        sampler = context.samplers.make_sampler(
            self._config.run.seed,
            stage.name,
            version=version,
            concurrent=stage.async_rollouts,
            record_routes=stage.loss.routing_replay == "engine",
        )
        context.samplers.sync_weights(version)
        check = self._check_logprobs(stage, sampler)
        pipeline = context.build_rollout_pipeline(stage, sampler)
        settings = RlSettings(num_steps=stage.steps, prompts_per_round=stage.max_prompts_in_flight)
        components = RlComponents(
            source=source,
            prompt_builder=context.processor,
            rollout_pipeline=context.share_rollout_pipeline(pipeline, settings.prompts_per_round),
            scorer=context.share_scorer(self._placement),
            add_group_rewards=partial(add_group_rewards, group_rewards=context.group_rewards),
            selector=context.build_selector(stage, self._placement),
            learner=learner,
            update_reference=update_reference or (lambda _step: {}),
            sync_weights=partial(self._sync_weights, sampler, check),
            callbacks=callbacks,
            ranks=self._ranks,
        )
        if not stage.async_rollouts:
            run_rl_stage(settings, components, self._state)
            return
        async_rollouts = AsyncRollouts(
            pipeline=pipeline,
            ranks=self._ranks,
            prompts_per_round=settings.prompts_per_round,
            executor=context.samplers.rollout_thread,
        )
        run_async_rl_stage(settings, components, async_rollouts, self._state)

    def _check_logprobs(self, stage: RlStage, sampler: Sampler) -> LogprobCheck | None:
        """Check that the sampler's log-probs match the learner's; return the check, to be repeated as it is due.

        By default the policy itself samples, and there is nothing to check.
        """
        context, options = self._context, self._config.rollout
        if options.engine == "hf" and not options.logprob_check.every:
            return None
        check = LogprobCheck(
            sampler,
            context.policy,
            context.processor,
            samples=context.samples.train,
            sampling_params=context.build_sampling_params(stage.sampling),
            options=options.logprob_check,
            warn=self._console.warn,
            ranks=self._ranks,
        )
        measure = partial(check.measure, self._state.version)
        metrics = self._console.wait_for("comparing the rollout engine with the learner", measure)
        # A resumed stage has logged its first check already.
        if self._state.step == 0:
            self._logger.log_metrics(self._state, metrics)
        return check

    def _sync_weights(self, sampler: Sampler, check: LogprobCheck | None, version: int) -> None:
        """Give the sampler the learner's weights; check the log-probs under them if that is due."""
        sampler.sync(version)
        if check is not None and (metrics := check.measure_if_due(version)):
            self._logger.log_metrics(self._state, metrics)

    def _build_reference(self, stage: SftStage | RlStage) -> ReferencePolicy | None:
        """Return the policy that the KL penalty measures from, or None if the stage has no penalty.

        A reference that never moves is saved once, beside the checkpoints; one that moves is part of each checkpoint.
        """
        if isinstance(stage, SftStage) or not stage.loss.kl.coef:
            return None
        policy, options = self._context.policy, stage.reference
        earlier_stages = self._config.stages[: self._state.stage_index]
        trained_before = any(isinstance(earlier, SftStage | RlStage) for earlier in earlier_stages)
        # A new adapter has changed nothing yet, so the model without it is the policy at the stage's start.
        adapter_is_new = self._config.model.lora is not None and not trained_before
        if options.init_from == "base" or (options.update == "never" and adapter_is_new):
            return ReferencePolicy(policy, options, initial_copy=policy.without_adapter())
        reference = ReferencePolicy(policy, options, ranks=self._ranks)
        folder = self._run_dir.reference_weights / stage.name
        if not reference.is_frozen:
            if self._optimizer:
                reference.load_state(self._optimizer)
        elif self._state.step == 0:
            weights = self._checkpoint_weights(reference.policy)
            self._ranks.on_rank0(partial(checkpoint.save_weights, folder, weights))
        else:
            checkpoint.load_weights(folder, self._checkpoint_weights(reference.policy))
        return reference

    def _stop_requested(self) -> bool:
        """Return True on every rank if a signal has reached any of them. Collective."""
        return any(self._ranks.all_gather(self._stop.received is not None))

    def _load_checkpoint(self) -> tuple[TrainingState, dict[str, Any]]:
        """Load the weights of the latest checkpoint; return its state and optimizer state, or those of a new run."""
        # A stage with more steps than it had goes on from its own last checkpoint, even if the run was finished.
        lengthened = self._ranks.on_rank0(self._run_dir.find_lengthened_stage)
        folder = checkpoint.find_latest(self._run_dir.checkpoints, self._console.warn, self._ranks, until=lengthened)
        if folder is None:
            return TrainingState(), {}
        check_same_run(folder, diff_configs(read_flat_settings(folder / checkpoint.CONFIG_FILE), self._config))
        state, optimizer = checkpoint.load_checkpoint(
            folder,
            weights=self._checkpoint_weights(self._context.policy),
            # ZeRO-3 copies the weights when it shards them, so they need not be read into memory before.
            mmap=self._context.is_zero3,
        )
        # The config is written after this: a kill in between leaves a run that goes on with either.
        if lengthened is not None:
            self._ranks.on_rank0(partial(checkpoint.remove_later_stages, self._run_dir.checkpoints, lengthened))
            self._console.info(describe_lengthening(self._config.stages[lengthened], state))
        if any(self._ranks.all_gather(bool(self._context.data_record.differences))):
            # Their prompts may not be the same any more; replay and carried-over groups check theirs themselves.
            state.unfinished, state.prefetched = (), None
        if state.stage_index < len(self._config.stages):
            name = self._config.stages[state.stage_index].name
            self._console.info(f"Resuming from {folder}: stage {name}, step {state.step}.")
        return state, optimizer

    def _save_checkpoint(self, optimizer: dict[str, Any], state: TrainingState) -> None:
        """Save the run; every rank writes its own share. Collective."""
        state.metrics_bytes = self._logger.metrics.position()
        best, policy = self._config.checkpoints.best, self._context.policy
        trained = policy.runner.local_shard(policy.trained, self._ranks)
        snapshot = checkpoint.Snapshot(
            weights=checkpoint.CheckpointWeights(trained=trained, frozen_fingerprint=self._frozen_fingerprint),
            optimizer=optimizer,
            rng=checkpoint.read_rng_states(),
            state=state,
            config_yaml=self._config_yaml,
            best_metric=self._logger.last_value(best.metric) if best else None,
        )
        self._checkpoints.save(snapshot, before_write=self._logger.metrics.sync)

    def _checkpoint_weights(self, policy: Policy) -> checkpoint.CheckpointWeights:
        return checkpoint.CheckpointWeights(trained=policy.trained, frozen_fingerprint=self._frozen_fingerprint)

    def _evaluate(self, samples: tuple[Sample, ...]) -> EvalRewards:
        """Measure the held-out reward of `samples` under the current weights. Collective."""
        self._context.samplers.sync_weights(self._state.version)
        with self._context.samplers.gather_for_sampling():
            return measure_across_ranks(partial(self._measure_rewards, step=self._state.step), samples, self._ranks)

    def _evaluate_test_samples(self, moment: str) -> None:
        """Measure the test samples `before` or `after`, unless that was done, and keep the rewards in the state."""
        if moment in self._state.eval_rewards or not self._context.samples.test:
            return
        rewards, rollout_metrics = self._evaluate(self._context.samples.test)
        kept, values = {}, {}
        for task, by_sample in rewards.items():
            kept[task], values[task] = dict(by_sample), fmean(by_sample.values())
        self._state.eval_rewards[moment] = kept
        values |= rollout_metrics
        self._logger.log_metrics(self._state, {f"test/{name}": value for name, value in values.items()})

    def _write_results(self) -> None:
        best = self._config.checkpoints.best
        if best and self._logger.last_value(best.metric) is None:
            self._console.warn(
                f"checkpoints.best: this run recorded no {best.metric!r}; its metrics.jsonl has the names"
            )
        rewards = self._state.eval_rewards
        rows = compare_rewards(rewards["before"], rewards["after"]) if rewards.keys() >= {"before", "after"} else []
        since = self._config.stages[self._compared_stage].name
        self._run_dir.write_summary(
            {"name": self._config.run.name, "seed": self._config.run.seed, "since": since, **comparison_summary(rows)}
        )
        context = self._context
        step_id = str(checkpoint.StepId(self._state.stage_index, 0))
        facts = collect_card_facts(self._run_dir, self._config, self._state, step_id)
        if context.adapter is not None:
            # Before the model's folder: merging ends the adapter.
            write_adapter(self._run_dir.adapter, context.adapter, facts)
            context.adapter.merge()
        self._console.wait_for(
            "writing the model", partial(write_model, self._run_dir.model, context.model_bundle, facts)
        )
