"""A run from its config to its exported model: `train` claims its directory, `complete_run` does the rest in order."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from mmrl import checkpoint
from mmrl.checkpoint.hf_export import collect_card_facts, write_adapter, write_model
from mmrl.config import LoadedConfig
from mmrl.config.schema import RlStage, SampleStage, SelectStage, SftStage
from mmrl.distributed.ranks import RankLostError
from mmrl.distributed.torch_ranks import join_ranks
from mmrl.log.comparison import compare_rewards, comparison_summary, print_summary
from mmrl.log.console import Console
from mmrl.log.library_messages import log_library_messages
from mmrl.log.logger import MetricsLogger, NullLogger, RunLogger
from mmrl.log.run_dir import run_dir_of
from mmrl.log.trackers.process import follow_run
from mmrl.training.benchmarks import TrainingBenchmarks, digest_questions, read_all_benchmark_questions
from mmrl.training.build import RunComponents, RunSetup, build_run
from mmrl.training.callbacks import BenchmarkRunner, Callback, make_callbacks
from mmrl.training.functions import Functions, load_functions
from mmrl.training.held_out import HeldOutEvaluation, first_compared_stage
from mmrl.training.preflight import FINISHED_MESSAGE, effective_config
from mmrl.training.rl_stage import run_rl_stage
from mmrl.training.run_checkpoints import RunCheckpoints
from mmrl.training.sample_stage import run_sample_stage
from mmrl.training.select_stage import run_select_stage
from mmrl.training.sft_stage import run_sft_stage
from mmrl.training.stage import StageServices
from mmrl.training.stop_signal import StopSignal
from mmrl.types import RunInterrupted, TrainingState


def train(
    loaded: LoadedConfig,
    *,
    steps: int | None = None,
    run_dir: Path | None = None,
    functions: Functions | None = None,
    resume_command: str = "the same call",
) -> int:
    """Run every stage of a config, or continue where it stopped; return the exit code.

    Args:
        loaded: The config and the files it came from.
        steps: Upper bound on the steps of each stage.
        run_dir: Replaces `run.dir` of the config.
        functions: The functions that the config names; None to load them.
        resume_command: Says how to continue an interrupted run.

    Raises:
        UserError: something the user can fix. A run that had not begun leaves nothing behind.
    """
    config = effective_config(loaded, steps=steps, run_dir=run_dir)
    base_dir = loaded.files[0].parent
    with join_ranks(config.distributed.timeout_s, force_group=config.deepspeed is not None) as ranks:
        # Rank 0 alone writes to the run directory and the console.
        console = Console(quiet=ranks.rank > 0)
        stop = StopSignal(console.warn)
        try:
            setup = RunSetup(
                config=config,
                base_dir=base_dir,
                functions=functions or load_functions(config, base_dir),
                run_dir=run_dir_of(config),
                console=console,
                ranks=ranks,
            )
            with claim_folder(setup, stop) as has_begun:
                if has_begun and ranks.on_rank0(setup.run_dir.is_finished):
                    console.info(FINISHED_MESSAGE)
                else:
                    complete_run(setup, loaded.warnings, stop, has_begun=has_begun)
                ranks.on_rank0(partial(print_summary, setup.run_dir, console))
        except (RunInterrupted, KeyboardInterrupt, RankLostError) as stopped:
            # A signal reaches all ranks. One that stops first is lost to slower ranks, which is then not an error.
            if isinstance(stopped, RankLostError) and stop.received is None:
                raise
            saved = "Saved."
            if not isinstance(stopped, RunInterrupted):
                saved = "Stopped. This step is not saved; the last checkpoint is, if there is one."
            console.info(f"{saved} Continue with: {resume_command}")
            # Shells report a process that a signal ended with this exit code.
            return 128 + (stop.received or signal.SIGINT)
    return 0


@contextmanager
def claim_folder(setup: RunSetup, stop: StopSignal) -> Iterator[bool]:
    """Lock the run directory and make it ready for the run; yield True if it has a checkpoint. Collective.

    Raises:
        UserError: another process runs there, or it holds something other than this run.
    """
    run_dir, ranks = setup.run_dir, setup.ranks
    # SIGTERM too should unwind and clean up, as Ctrl-C does.
    with stop.handle(signal.SIGTERM, finish_step=False), ExitStack() as lock:
        ranks.on_rank0(partial(lock.enter_context, run_dir.lock()))
        yield ranks.on_rank0(partial(run_dir.claim, setup.config, setup.console.info))


def complete_run(setup: RunSetup, warnings: Sequence[str], stop: StopSignal, *, has_begun: bool) -> None:
    """Build the run, run the stages that are left, and write its results."""
    config, ranks = setup.config, setup.ranks
    for warning in warnings:
        setup.console.warn(warning)
    with ExitStack() as stack:
        stack.enter_context(log_library_messages(setup.run_dir.log, rank=ranks.rank))
        run, benchmarks, user_callbacks = stack.enter_context(open_run(setup, has_begun=has_begun))
        services, state = stack.enter_context(restore_or_start(run, benchmarks, user_callbacks, stop))
        if ranks.rank == 0:
            stack.enter_context(follow_run(config, setup.base_dir, setup.run_dir, setup.console))
        with stop.handle(signal.SIGINT, signal.SIGTERM, finish_step=True):
            if state.stage_index == 0 and isinstance(config.stages[0], SampleStage):
                # A restart empties a run directory without a checkpoint; this stage would lose the rows of its table.
                save_between_stages(services, state)
            for stage in config.stages[state.stage_index :]:
                match stage:
                    case SftStage():
                        run_sft_stage(stage, services, state)
                    case RlStage():
                        run_rl_stage(stage, services, state)
                    case SampleStage():
                        run_sample_stage(stage, services.run, services.logger, state, services.agree_to_stop)
                    case SelectStage():
                        run_select_stage(stage, services.run, services.logger, state)
                state = TrainingState(
                    stage_index=state.stage_index + 1, version=state.version, eval_rewards=state.eval_rewards
                )
                save_between_stages(services, state)
                if services.agree_to_stop():
                    raise RunInterrupted
        finish_run(services, state)


def save_between_stages(services: StageServices, state: TrainingState) -> None:
    """Save a checkpoint, and wait until it is on the disk: only then may the next stage begin."""
    services.checkpoints.save(state, {})
    services.run.console.wait_for("saving the checkpoint", services.checkpoints.manager.wait)


def finish_run(services: StageServices, state: TrainingState) -> None:
    """Measure the test samples after the last stage, unless the state has their rewards, and write the results."""
    run, checkpoints = services.run, services.checkpoints
    if "after" not in state.eval_rewards:
        services.held_out.measure_test_samples(state, "after")
        checkpoints.save(state, {})
    checkpoints.manager.wait()
    if services.sharded_model is not None:
        # Rank 0 then holds all of the model.
        services.sharded_model.unwrap(run.policy)
    run.ranks.on_rank0(partial(write_results, services, state))
    services.logger.close()


@contextmanager
def open_run(
    setup: RunSetup, *, has_begun: bool
) -> Iterator[tuple[RunComponents, TrainingBenchmarks, Sequence[Callback]]]:
    """Build everything that outlives the stages, and the user's callbacks; close it after the block. Collective.

    Raises:
        UserError: something would fail later. A directory in which no run has begun is removed.
    """
    config, ranks = setup.config, setup.ranks
    cleanup = nullcontext() if ranks.rank else setup.run_dir.remove_on_error(keep=has_begun)
    with cleanup, ExitStack() as building:
        # Steps that can fail early come first.
        folders = setup.base_dir, setup.run_dir.data
        questions = ranks.on_rank0(partial(read_all_benchmark_questions, config, setup.functions.benchmarks, *folders))
        run = build_run(setup, building)
        benchmarks, user_callbacks = TrainingBenchmarks(run, questions), make_callbacks(run)
        ranks.on_rank0(partial(write_run_info, run, digest_questions(config, questions)))
        resources = building.pop_all()
    with resources:
        yield run, benchmarks, user_callbacks


def write_run_info(run: RunComponents, benchmarks: Mapping[str, str]) -> None:
    """Write the manifest, the record of data and `benchmarks`, and for a model made from scratch its processor."""
    run_dir = run.run_dir
    run.data_record.check_benchmarks(benchmarks)
    run_dir.write_manifest(run.config, run.base_dir, run.samples.content_hashes(), run.data_record.differences)
    run.data_record.save()
    if run.config.model.from_scratch and not run_dir.processor.exists():
        checkpoint.export_hf_folder(run_dir.processor, run.processor.hf_processor, run.policy.model.config)


@contextmanager
def restore_or_start(
    run: RunComponents, benchmarks: TrainingBenchmarks, user_callbacks: Sequence[Callback], stop: StopSignal
) -> Iterator[tuple[StageServices, TrainingState]]:
    """Load the latest checkpoint, if there is one; yield the stages' services, and the state that they start from.

    Collective; raises as `RunCheckpoints.load`.
    """
    config, ranks, run_dir = run.config, run.ranks, run.run_dir
    # Rank 0 alone writes; the others log into nothing, so that all make the same calls.
    logger: MetricsLogger = NullLogger()
    if ranks.rank == 0:
        logger = RunLogger(run_dir, run.console, run.processor)
    held_out = HeldOutEvaluation(run, logger)
    checkpoints = RunCheckpoints(run, logger)
    state = checkpoints.load()
    ranks.on_rank0(partial(run_dir.reopen, config))
    sharded_model = None
    if config.deepspeed is not None:
        from mmrl.learner.optimizer_deepspeed import DeepspeedModel

        # After the weights of the checkpoint were loaded into the whole model.
        sharded_model = DeepspeedModel(run.policy, config.deepspeed, ranks)
    ranks.on_rank0(partial(logger.resume_from, state))
    services = StageServices(
        run=run,
        sharded_model=sharded_model,
        logger=logger,
        checkpoints=checkpoints,
        held_out=held_out,
        benchmarks=BenchmarkRunner(benchmarks.evaluate_due, logger.log_metrics),
        user_callbacks=user_callbacks,
        agree_to_stop=partial(stop.reached_any, ranks),
    )
    with logger.status.report(), checkpoints.manager:
        yield services, state


def write_results(services: StageServices, state: TrainingState) -> None:
    """Compare the held-out rewards before and after training, and export the model."""
    run = services.run
    config, run_dir, best = run.config, run.run_dir, run.config.checkpoints.best
    if best and services.logger.last_value(best.metric) is None:
        run.console.warn(f"checkpoints.best: this run recorded no {best.metric!r}; its metrics.jsonl has the names")
    rewards = state.eval_rewards
    rows = compare_rewards(rewards["before"], rewards["after"]) if rewards.keys() >= {"before", "after"} else []
    since = config.stages[first_compared_stage(config)].name
    comparison = comparison_summary(rows, config.evaluation.temperature)
    run_dir.write_summary({"name": config.run.name, "seed": config.run.seed, "since": since, **comparison})
    step_id = str(checkpoint.StepId(state.stage_index, 0))
    facts = collect_card_facts(run_dir, config, state, step_id)
    if run.adapter is not None:
        # Before the model's folder: merging ends the adapter.
        write_adapter(run_dir.adapter, run.adapter, facts)
        run.adapter.merge()
    run.console.wait_for("writing the model", partial(write_model, run_dir.model, run.model_bundle, facts))
