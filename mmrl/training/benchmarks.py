"""Benchmarks that a run takes: read and checked before training, then taken with the policy of the moment, by the code
and with the files of `mmrl eval`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mmrl import checkpoint
from mmrl.benchmarks.readers.questions import BenchmarkQuestions
from mmrl.benchmarks.registry import get_benchmark
from mmrl.benchmarks.score_files import write_report
from mmrl.config import Config, EvalConfig, load_eval_config
from mmrl.config.schema import BenchmarkConfig
from mmrl.data.context import benchmark_folders, make_media_policy
from mmrl.evaluation.model_under_test import inherit_settings
from mmrl.evaluation.provenance import describe_generation, evaluation_identity
from mmrl.evaluation.questions import QuestionSet, benchmark_question_set, read_benchmark_files
from mmrl.evaluation.session import (
    EvalDir,
    EvalSession,
    build_eval_pipeline,
    check_missing,
    find_unusable_questions,
    make_batches,
    run_session,
)
from mmrl.log.console import null_console
from mmrl.ports import RolloutPipeline
from mmrl.training.build import RunContext
from mmrl.types import DatasetContext, TrainingState, UserError

EvalMoment = Literal["before", "step", "after"]
"""When benchmarks may be due: before a stage, after each of its steps, and as it ends."""


def read_all_benchmark_questions(config: Config, base_dir: Path, work_dir: Path) -> tuple[BenchmarkQuestions, ...]:
    """The questions of each benchmark; what has no file goes under `work`.

    Raises:
        UserError: there is no such benchmark, or its files cannot be used; the message names it.
    """
    return tuple(
        read_benchmark_questions(benchmark, config, base_dir, work_dir) for benchmark in config.evaluation.benchmarks
    )


def read_benchmark_questions(
    benchmark: BenchmarkConfig, config: Config, base_dir: Path, work_dir: Path
) -> BenchmarkQuestions:
    """The questions of one of them; raises as `read_benchmarks`."""
    try:
        get_benchmark(benchmark.benchmark_name)
        questions = read_benchmark_files(
            benchmark.benchmark_name,
            benchmark.data,
            _make_dataset_context(benchmark, config, base_dir, work_dir),
            split=benchmark.split,
            media_root=benchmark.media_root,
            coordinate_system=benchmark.coordinates,
        )
    except UserError as error:
        raise UserError(f"evaluation.benchmarks.{benchmark.name}: {error}") from error
    columns = dict.fromkeys(column for item in questions.items.values() for column in item.subsets)
    if unknown := [column for column in benchmark.subsets if column not in columns]:
        raise UserError(
            f"evaluation.benchmarks.{benchmark.name}.subsets: no question has {unknown[0]!r}; they have "
            f"{', '.join(columns) or 'no columns to break results down by'}"
        )
    return questions


def _make_eval_config(benchmark: BenchmarkConfig, config: Config) -> EvalConfig:
    """The settings of `mmrl eval` that this run brings, for a benchmark."""
    given = inherit_settings(config, by_rule=True)
    given["evaluation"]["temperature"] = config.evaluation.benchmark_temperature(benchmark)
    return load_eval_config({**given, "samples": benchmark.responses_per_question}, "the config", ())


def _make_dataset_context(benchmark: BenchmarkConfig, config: Config, base_dir: Path, work_dir: Path) -> DatasetContext:
    folders = benchmark_folders(benchmark.data, benchmark.media_root, base_dir)
    access = make_media_policy(config.data.media_limits, (work_dir, *folders), schemes=("data",))
    return DatasetContext(work_dir=work_dir, base_dir=base_dir, seed=config.run.seed, media_policy=access)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreparedBenchmark:
    """A benchmark that can be taken at any time; `missing` are the questions that cannot be asked."""

    options: BenchmarkConfig
    eval_config: EvalConfig
    question_set: QuestionSet
    pipeline: RolloutPipeline
    missing: Mapping[str, str]

    def is_due(self, step: int, moment: EvalMoment) -> bool:
        """Whether it is taken after this step; as a stage ends only where it was not a moment ago."""
        within = self.options.every is not None and step % self.options.every == 0
        return moment == "before" or within == (moment == "step")


class TrainingBenchmarks:
    """The benchmarks of a run."""

    def __init__(self, run_context: RunContext, base_dir: Path, question_lists: Sequence[BenchmarkQuestions]) -> None:
        """`read` are the questions of each, as `read_benchmarks` found them.

        Raises:
            UserError: questions cannot be asked, or not with the evaluation's program.
        """
        self._run_context, config = run_context, run_context.config
        self._first_training_stage = config.stages.index(config.training_stages[0])
        self._silent_console = null_console()
        every = zip(config.evaluation.benchmarks, question_lists, strict=True)
        self._benchmarks = [self._prepare(options, questions, base_dir) for options, questions in every]

    def evaluate_due(self, state: TrainingState, moment: EvalMoment) -> dict[str, float]:
        """Metrics of the benchmarks that are due; those that were taken already are read again.

        Raises:
            UserError: the disk is full, or a medium has changed.
        """
        if moment == "before" and (state.step or state.stage_index != self._first_training_stage):
            return {}
        due = [ready for ready in self._benchmarks if ready.is_due(state.step, moment)]
        revision = checkpoint.fingerprint_weights(self._run_context.policy.iter_params()) if due else ""
        return {name: value for ready in due for name, value in self._evaluate(ready, state, revision).items()}

    def _prepare(self, options: BenchmarkConfig, questions: BenchmarkQuestions, base_dir: Path) -> _PreparedBenchmark:
        world, exam = self._run_context, _make_eval_config(options, self._run_context.config)
        place = _make_dataset_context(options, world.config, base_dir, world.run_dir.data)
        asked = benchmark_question_set(options.name, options.benchmark_name, questions, place.media_policy)
        missing = world.ranks.on_rank0(partial(self._check_questions, options, questions))
        program = build_eval_pipeline(
            exam,
            asked,
            samplers=world.samplers,
            processor=world.processor,
            banned_token_ids=world.banned_token_ids,
            tool_runner=world.tool_runner,
        )
        return _PreparedBenchmark(
            options=options, eval_config=exam, question_set=asked, pipeline=program, missing=missing
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

    def _evaluate(self, benchmark: _PreparedBenchmark, state: TrainingState, revision: str) -> dict[str, float]:
        """Take a benchmark, or what of it is left; its folder is named as a checkpoint of this moment would be."""
        world, exam, asked, questions = (
            self._run_context,
            benchmark.eval_config,
            benchmark.question_set,
            benchmark.question_set.questions,
        )
        place = str(checkpoint.StepId(state.stage_index, state.step))
        desk = EvalDir(world.run_dir.benchmarks / asked.name / place)
        of = world.ranks.on_rank0(
            lambda: evaluation_identity(benchmark.options.benchmark_name, revision, questions, exam)
        )
        world.ranks.on_rank0(lambda: desk.claim_or_reset(of, benchmark.missing))
        size = exam.evaluation.batch_size * world.ranks.size
        paper = make_batches(
            questions, benchmark.missing, batch_size=size, responses_per_question=exam.responses_per_question
        )
        answered = world.ranks.on_rank0(lambda: paper.read_predictions(desk))
        if not paper.is_complete(answered):
            world.samplers.sync_weights(state.version)
            room = EvalSession(
                name=asked.name,
                eval_dir=desk,
                processor=world.processor,
                pipeline=benchmark.pipeline,
                grader=asked.grader,
                console=self._silent_console,
                ranks=world.ranks,
            )
            with world.samplers.gather_for_sampling():
                answered = run_session(paper, answered, room)
        model = f"{world.config.run.name}, {place}"
        run = asked.grader.grade_run(
            answered,
            describe_generation(model, benchmark.options.data, of, exam, questions=questions, predictions=answered),
        )
        report = world.ranks.on_rank0(lambda: write_report(run, desk.path, rescore=True))
        self._print_scores(asked.name, state, report)
        return _report_metrics(benchmark.options, report)

    def _print_scores(self, name: str, state: TrainingState, report: Mapping[str, Any]) -> None:
        strict, compat = report["strict"], report["compat"]["value"]
        low, high = 100 * strict["low"], 100 * strict["high"]
        stage = self._run_context.config.stages[state.stage_index].name
        self._run_context.console.info(
            f"{name} after {state.step} steps of {stage}: strict {100 * strict['value']:.1f} % (95 % from {low:.1f} to "
            f"{high:.1f}), compat {100 * compat:.1f} %"
        )


def _report_metrics(options: BenchmarkConfig, report: Mapping[str, Any]) -> dict[str, float]:
    """What metrics.jsonl has of a report."""
    told = {
        "accuracy": report["strict"]["value"],
        "compat": report["compat"]["value"],
        "truncated_frac": report["truncated_rate"],
        "no_answer_frac": report["no_answer_rate"],
        "tokens_mean": report["mean_tokens"],
        **{name.replace(" ", "_"): value for name, value in report["overall"].items()},
    }
    for k, row in report["samples"].items():
        told |= {f"{kind}@{k}": value for kind, value in row.items()}
    for column in options.subsets:
        told |= {f"{column}/{value}": row["strict"] for value, row in report["subsets"][column].items()}
    return {f"benchmark/{options.name}/{name}": float(value) for name, value in told.items()}
