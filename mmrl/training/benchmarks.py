"""Benchmarks during training: read and checked before the first step, then taken with the policy of the moment.

They run the code of `mmrl eval` and leave its files, so that a checkpoint evaluated later has the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mmrl import checkpoint
from mmrl.benchmarks.benchmark import Benchmark
from mmrl.benchmarks.predictions import Prediction
from mmrl.benchmarks.readers.questions import BenchmarkQuestions, read_questions
from mmrl.benchmarks.registry import get_benchmark, load_benchmark
from mmrl.benchmarks.report import write_report
from mmrl.config import Config, EvalConfig, load_eval_config
from mmrl.config.schema import BenchmarkConfig
from mmrl.data.context import benchmark_folders, make_media_policy
from mmrl.evaluation.model_source import inherit_settings
from mmrl.evaluation.question_set import QuestionSet, benchmark_question_set
from mmrl.evaluation.session import (
    EvalDir,
    EvalSession,
    build_eval_pipeline,
    check_missing,
    describe_generation,
    evaluation_identity,
    find_unusable_questions,
    make_batches,
    run_session,
)
from mmrl.log.console import null_console
from mmrl.ports import RolloutPipeline
from mmrl.training.build import RunContext
from mmrl.types import DatasetContext, TrainingState, UserError

EvalMoment = Literal["before", "step", "after"]
"""Moment at which benchmarks may be due: before the first stage, after a step, or at the end of a stage."""


def read_all_benchmark_questions(config: Config, base_dir: Path, work_dir: Path) -> tuple[BenchmarkQuestions, ...]:
    """Read the questions of every benchmark in the config.

    Args:
        config: config of the run.
        base_dir: folder that relative paths of the config start from.
        work_dir: folder for images that are in no file of their own.

    Raises:
        UserError: a benchmark does not exist, or its files cannot be used; the message names it.
    """
    return tuple(
        read_benchmark_questions(options, config, base_dir, work_dir) for options in config.evaluation.benchmarks
    )


def read_benchmark_questions(
    options: BenchmarkConfig, config: Config, base_dir: Path, work_dir: Path
) -> BenchmarkQuestions:
    """Read the questions of one benchmark.

    Raises:
        UserError: as `read_all_benchmark_questions`.
    """
    try:
        questions = read_questions(
            _load_benchmark(options, base_dir),
            options.data,
            _make_dataset_context(options, config, base_dir, work_dir),
            split=options.split,
            media_root=options.media_root,
            coordinate_system=options.coordinates,
        )
    except UserError as error:
        raise UserError(f"evaluation.benchmarks.{options.name}: {error}") from error
    columns: dict[str, None] = {}
    for item in questions.items.values():
        columns |= dict.fromkeys(item.subsets)
    unknown = []
    for column in options.subsets:
        if column not in columns:
            unknown.append(column)
    if unknown:
        raise UserError(
            f"evaluation.benchmarks.{options.name}.subsets: no question has {unknown[0]!r}; they have "
            f"{', '.join(columns) or 'no columns to break results down by'}"
        )
    return questions


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreparedBenchmark:
    """A benchmark that is checked and can be taken at any step."""

    options: BenchmarkConfig
    """Its section of the config."""
    benchmark: Benchmark
    """Its rules."""
    eval_config: EvalConfig
    """The settings that `mmrl eval` would have for this run."""
    question_set: QuestionSet
    """Its questions."""
    pipeline: RolloutPipeline
    """Answers them with the current policy."""
    missing: Mapping[str, str]
    """Reasons why questions cannot be asked, by item id."""

    def is_due(self, step: int, moment: EvalMoment) -> bool:
        """Return True when the benchmark is to be taken now.

        A stage whose last step was due already is not followed by another time at its end.
        """
        due_at_step = self.options.every is not None and step % self.options.every == 0
        return moment == "before" or due_at_step == (moment == "step")


class TrainingBenchmarks:
    """The benchmarks of a training run."""

    def __init__(self, run_context: RunContext, base_dir: Path, question_lists: Sequence[BenchmarkQuestions]) -> None:
        """Check all benchmarks.

        Args:
            run_context: the run.
            base_dir: folder that relative paths of the config start from.
            question_lists: result of `read_all_benchmark_questions`.

        Raises:
            UserError: questions cannot be asked, or not with the evaluation's rollout steps.
        """
        self._run_context, config = run_context, run_context.config
        self._first_training_stage = config.stages.index(config.training_stages[0])
        self._silent_console = null_console()
        self._benchmarks = [
            self._prepare(options, questions, base_dir)
            for options, questions in zip(config.evaluation.benchmarks, question_lists, strict=True)
        ]

    def evaluate_due(self, state: TrainingState, moment: EvalMoment) -> dict[str, float]:
        """Take the benchmarks that are due, and return their metrics. Finished ones are read again.

        Raises:
            UserError: the disk is full, or an image or video has changed.
        """
        if moment == "before" and (state.step or state.stage_index != self._first_training_stage):
            return {}
        due = [prepared for prepared in self._benchmarks if prepared.is_due(state.step, moment)]
        # Hashing all weights takes a while, so only when a benchmark is due.
        revision = checkpoint.fingerprint_weights(self._run_context.policy.iter_params()) if due else ""
        metrics: dict[str, float] = {}
        for prepared in due:
            metrics |= self._evaluate(prepared, state, revision)
        return metrics

    def _prepare(self, options: BenchmarkConfig, questions: BenchmarkQuestions, base_dir: Path) -> _PreparedBenchmark:
        context = self._run_context
        eval_config = _make_eval_config(options, context.config)
        dataset_context = _make_dataset_context(options, context.config, base_dir, context.run_dir.data)
        benchmark = _load_benchmark(options, base_dir)
        question_set = benchmark_question_set(options.name, benchmark, questions, dataset_context.media_policy)
        missing = context.ranks.on_rank0(partial(self._check_questions, options, questions))
        pipeline = build_eval_pipeline(
            eval_config,
            question_set,
            samplers=context.samplers,
            processor=context.processor,
            banned_token_ids=context.banned_token_ids,
            tool_runner=context.tool_runner,
        )
        return _PreparedBenchmark(
            options=options,
            benchmark=benchmark,
            eval_config=eval_config,
            question_set=question_set,
            pipeline=pipeline,
            missing=missing,
        )

    def _check_questions(self, options: BenchmarkConfig, questions: BenchmarkQuestions) -> dict[str, str]:
        missing = find_unusable_questions(questions, self._run_context.processor.encoder.measure)
        name = f"evaluation.benchmarks.{options.name}"
        try:
            check_missing(
                missing,
                questions,
                allowed=options.allow_missing,
                remedy=f"{name}.allow_missing=true",
                warn=self._run_context.console.warn,
            )
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        return missing

    def _evaluate(self, prepared: _PreparedBenchmark, state: TrainingState, revision: str) -> dict[str, float]:
        """Take a benchmark in a folder named as the checkpoint of this step would be, and return its metrics."""
        ranks = self._run_context.ranks
        step_id = str(checkpoint.StepId(state.stage_index, state.step))
        eval_dir = EvalDir(self._run_context.run_dir.benchmarks / prepared.question_set.name / step_id)
        questions = prepared.question_set.questions
        identity = ranks.on_rank0(
            partial(evaluation_identity, prepared.benchmark.name, revision, questions, prepared.eval_config)
        )
        ranks.on_rank0(partial(eval_dir.claim_or_reset, identity, prepared.missing))
        predictions = self._answer_questions(prepared, eval_dir, state)
        generation = describe_generation(
            f"{self._run_context.config.run.name}, {step_id}",
            prepared.options.data,
            identity,
            prepared.eval_config,
            questions=questions,
            predictions=predictions,
        )
        run = prepared.question_set.grader.grade_run(predictions, generation)
        report = ranks.on_rank0(partial(write_report, run, eval_dir.path, rescore=True))
        self._print_scores(prepared.question_set.name, state, report)
        return _report_metrics(prepared.options, report)

    def _answer_questions(
        self, prepared: _PreparedBenchmark, eval_dir: EvalDir, state: TrainingState
    ) -> list[Prediction]:
        """Return all predictions, of which those on disk are not generated again. Collective over ranks."""
        context = self._run_context
        batches = make_batches(
            prepared.question_set.questions,
            prepared.missing,
            batch_size=prepared.eval_config.evaluation.batch_size * context.ranks.size,
            responses_per_question=prepared.eval_config.responses_per_question,
        )
        predictions = context.ranks.on_rank0(partial(batches.read_predictions, eval_dir))
        if batches.is_complete(predictions):
            return predictions
        context.samplers.sync_weights(state.version)
        session = EvalSession(
            name=prepared.question_set.name,
            eval_dir=eval_dir,
            processor=context.processor,
            pipeline=prepared.pipeline,
            grader=prepared.question_set.grader,
            console=self._silent_console,
            ranks=context.ranks,
        )
        with context.samplers.gather_for_sampling():
            return run_session(batches, predictions, session)

    def _print_scores(self, name: str, state: TrainingState, report: Mapping[str, Any]) -> None:
        strict, official = report["strict"], report["official"]["value"]
        low, high = 100 * strict["low"], 100 * strict["high"]
        stage = self._run_context.config.stages[state.stage_index].name
        self._run_context.console.info(
            f"{name} after {state.step} steps of {stage}: strict {100 * strict['value']:.1f} % (95 % from {low:.1f} to "
            f"{high:.1f}), official {100 * official:.1f} %"
        )


def _load_benchmark(options: BenchmarkConfig, base_dir: Path) -> Benchmark:
    if options.fn is not None:
        return load_benchmark(options.fn, base_dir, options.args)
    return get_benchmark(options.benchmark_name, base_dir)


def _make_eval_config(options: BenchmarkConfig, config: Config) -> EvalConfig:
    """Return the settings that `mmrl eval` would have for a model of this run."""
    settings = inherit_settings(config, by_rule=True)
    settings["evaluation"]["temperature"] = config.evaluation.benchmark_temperature(options)
    settings["responses_per_question"] = options.responses_per_question
    return load_eval_config(settings, "the config", ())


def _make_dataset_context(options: BenchmarkConfig, config: Config, base_dir: Path, work_dir: Path) -> DatasetContext:
    folders = benchmark_folders(options.data, options.media_root, base_dir)
    media_policy = make_media_policy(config.data.media_limits, (work_dir, *folders), schemes=("data",))
    return DatasetContext(work_dir=work_dir, base_dir=base_dir, seed=config.run.seed, media_policy=media_policy)


def _report_metrics(options: BenchmarkConfig, report: Mapping[str, Any]) -> dict[str, float]:
    """Return what metrics.jsonl holds of a report."""
    values = {
        "accuracy": report["strict"]["value"],
        "official_accuracy": report["official"]["value"],
        "truncated_frac": report["truncated_rate"],
        "no_answer_frac": report["no_answer_rate"],
        "response_tokens_mean": report["mean_tokens"],
    }
    for name, value in report["overall"].items():
        values[name.replace(" ", "_")] = value
    for k, row in report["samples"].items():
        for kind, value in row.items():
            values[f"{kind}@{k}"] = value
    for column in options.subsets:
        for subset, row in report["subsets"][column].items():
            values[f"{column}/{subset}"] = row["strict"]
    return {f"benchmark/{options.name}/{name}": float(value) for name, value in values.items()}
