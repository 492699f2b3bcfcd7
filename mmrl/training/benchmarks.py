"""Benchmarks during training: questions are checked before the first step, and answered by the current policy when due.

They run the code of `mmrl eval` and write the same files, so evaluating the checkpoint later gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mmrl import checkpoint
from mmrl.benchmarks.benchmark import Benchmark
from mmrl.benchmarks.predictions import Prediction, read_complete_predictions
from mmrl.benchmarks.readers.questions import BenchmarkQuestions, read_questions
from mmrl.benchmarks.report import write_report
from mmrl.config import Config, EvalConfig, load_eval_config
from mmrl.config.schema import BenchmarkConfig
from mmrl.data.context import benchmark_folders
from mmrl.evaluation.eval_dir import EvalDir, evaluation_identity
from mmrl.evaluation.eval_settings import inherit_settings
from mmrl.evaluation.question_set import QuestionSet, question_set_of_benchmark
from mmrl.evaluation.session import (
    EvalBatches,
    build_eval_pipeline,
    check_missing,
    find_unusable_questions,
    generate_predictions,
    grade_predictions,
)
from mmrl.log.console import Console
from mmrl.media.checks import make_media_policy
from mmrl.protocols import RolloutPipeline
from mmrl.training.build import RunComponents
from mmrl.training.callbacks import EvalMoment
from mmrl.types import DatasetContext, TrainingState, UserError


def read_all_benchmark_questions(
    config: Config, benchmarks: Sequence[Benchmark], base_dir: Path, work_dir: Path
) -> tuple[BenchmarkQuestions, ...]:
    """Read the questions of the config's `benchmarks`. Raises as `read_benchmark_questions`."""
    questions = []
    for options, benchmark in zip(config.evaluation.benchmarks, benchmarks, strict=True):
        questions.append(read_benchmark_questions(options, benchmark, config, base_dir, work_dir))
    return tuple(questions)


def read_benchmark_questions(
    options: BenchmarkConfig, benchmark: Benchmark, config: Config, base_dir: Path, work_dir: Path
) -> BenchmarkQuestions:
    """Read the questions of one benchmark; paths start from `base_dir`, and images without a file go to `work_dir`.

    Raises:
        UserError: its files cannot be used; the message names it.
    """
    try:
        questions = read_questions(
            benchmark,
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
    unknown = [column for column in options.subsets if column not in columns]
    if unknown:
        raise UserError(
            f"evaluation.benchmarks.{options.name}.subsets: no question has {unknown[0]!r}; they have "
            f"{', '.join(columns) or 'no columns to break results down by'}"
        )
    return questions


def digest_questions(config: Config, questions: Sequence[BenchmarkQuestions]) -> dict[str, str]:
    """Return the digest of each benchmark's questions, by its name and files."""
    digests = {}
    for options, benchmark_questions in zip(config.evaluation.benchmarks, questions, strict=True):
        # The key names the files, so that a run may continue with other files on purpose.
        digests[f"{options.name} ({', '.join(options.data)})"] = benchmark_questions.digest()
    return digests


class _PreparedBenchmark(NamedTuple):
    """A benchmark whose questions were checked, ready to run at any step."""

    options: BenchmarkConfig  # its section of the config
    benchmark: Benchmark  # its rules
    eval_config: EvalConfig  # the settings that `mmrl eval` would have for this run
    question_set: QuestionSet  # its questions
    pipeline: RolloutPipeline  # answers them with the current policy
    missing: Mapping[str, str]  # reasons why questions cannot be asked, by item id


class TrainingBenchmarks:
    """The benchmarks of a training run."""

    def __init__(self, run: RunComponents, question_lists: Sequence[BenchmarkQuestions]) -> None:
        """Check all benchmarks; `question_lists` is the result of `read_all_benchmark_questions`.

        Raises:
            UserError: questions cannot be asked, or not with the evaluation's rollout steps.
        """
        config = run.config
        self._run = run
        self._first_training_stage = config.stages.index(config.training_stages[0])
        # `mmrl eval` prints its progress; a stage has its own progress bar.
        self._silent_console = Console(quiet=True, activity=run.console.activity)
        self._benchmarks: list[_PreparedBenchmark] = []
        benchmarks = run.functions.benchmarks
        for options, benchmark, questions in zip(config.evaluation.benchmarks, benchmarks, question_lists, strict=True):
            self._benchmarks.append(self._prepare(options, benchmark, questions))

    def evaluate_due(self, state: TrainingState, moment: EvalMoment) -> dict[str, float]:
        """Run the benchmarks that are due, and return their metrics. Predictions already on disk are reused.

        Raises:
            UserError: the disk is full, or an image or video has changed.
        """
        # Only a run that begins measures its initial policy; a resumed run has the results already.
        if moment == "before" and (state.step or state.stage_index != self._first_training_stage):
            return {}
        due: list[_PreparedBenchmark] = []
        for prepared in self._benchmarks:
            every = prepared.options.every
            due_at_step = every is not None and state.step % every == 0
            # If a benchmark was due at the stage's last step, it is not run again at the end of the stage.
            if moment == "before" or due_at_step == (moment == "step"):
                due.append(prepared)
        # Hashing all weights takes a while, so only when a benchmark is due.
        policy = self._run.policy
        revision = checkpoint.fingerprint_weights(policy.runner.iter_params(policy.trainable)) if due else ""
        metrics: dict[str, float] = {}
        for prepared in due:
            metrics |= self._evaluate(prepared, state, revision)
        return metrics

    def _prepare(
        self, options: BenchmarkConfig, benchmark: Benchmark, questions: BenchmarkQuestions
    ) -> _PreparedBenchmark:
        run = self._run
        settings = inherit_settings(run.config, by_rule=True)
        settings["evaluation"]["temperature"] = run.config.evaluation.benchmark_temperature(options)
        settings["responses_per_question"] = options.responses_per_question
        eval_config = load_eval_config(settings, "the config", ())
        dataset_context = _make_dataset_context(options, run.config, run.base_dir, run.run_dir.data)
        question_set = question_set_of_benchmark(options.name, benchmark, questions, dataset_context.media_policy)
        missing = run.ranks.on_rank0(partial(self._check_questions, options, questions))
        pipeline = build_eval_pipeline(
            eval_config,
            question_set.scorer,
            engine=run.engine,
            processor=run.processor,
            banned_token_ids=run.banned_token_ids,
            tool_runner=run.tool_runner,
            custom_steps=run.functions.evaluation_steps,
        )
        return _PreparedBenchmark(options, benchmark, eval_config, question_set, pipeline, missing)

    def _check_questions(self, options: BenchmarkConfig, questions: BenchmarkQuestions) -> dict[str, str]:
        missing = find_unusable_questions(questions, self._run.processor.encoder.measure)
        name = f"evaluation.benchmarks.{options.name}"
        try:
            check_missing(
                missing,
                questions,
                allowed=options.allow_missing,
                remedy=f"{name}.allow_missing=true",
                warn=self._run.console.warn,
            )
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        return missing

    def _evaluate(self, prepared: _PreparedBenchmark, state: TrainingState, revision: str) -> dict[str, float]:
        """Run a benchmark, in a folder named like the checkpoint of this step, and return its metrics."""
        ranks = self._run.ranks
        step_id = str(checkpoint.StepId(state.stage_index, state.step))
        eval_dir = EvalDir(self._run.run_dir.benchmarks / prepared.question_set.name / step_id)
        questions = prepared.question_set.questions
        identity = ranks.on_rank0(
            partial(evaluation_identity, prepared.benchmark.name, revision, questions, prepared.eval_config)
        )
        ranks.on_rank0(partial(eval_dir.claim_or_reset, identity, prepared.missing))
        predictions = self._answer_questions(prepared, eval_dir, state)
        graded = grade_predictions(
            prepared.question_set,
            predictions,
            prepared.eval_config,
            model=f"{self._run.config.run.name}, {step_id}",
            data_files=prepared.options.data,
            identity=identity,
        )
        report = ranks.on_rank0(partial(write_report, graded, eval_dir.path, rescore=True))
        strict, official = report["strict"], report["official"]["value"]
        low, high = 100 * strict["low"], 100 * strict["high"]
        stage = self._run.config.stages[state.stage_index].name
        self._run.console.info(
            f"{prepared.question_set.name} after {state.step} steps of {stage}: strict {100 * strict['value']:.1f} % "
            f"(95 % from {low:.1f} to {high:.1f}), official {100 * official:.1f} %"
        )
        return _report_metrics(prepared.options, report)

    def _answer_questions(
        self, prepared: _PreparedBenchmark, eval_dir: EvalDir, state: TrainingState
    ) -> list[Prediction]:
        """Return all predictions, and generate only the ones that are not on disk yet. Collective over ranks."""
        run = self._run
        batches = EvalBatches(
            prepared.question_set.questions,
            prepared.missing,
            batch_size=prepared.eval_config.evaluation.batch_size * run.ranks.size,
            responses_per_question=prepared.eval_config.responses_per_question,
        )
        read = partial(read_complete_predictions, eval_dir.predictions_file, batches.rows_per_batch)
        predictions = run.ranks.on_rank0(read)
        if batches.is_complete(predictions):
            return predictions
        run.engine.sync_weights(state.version)
        with run.engine.gather_for_sampling(), run.console.activity.during(f"answering {prepared.question_set.name}"):
            return generate_predictions(
                batches,
                predictions,
                question_set=prepared.question_set,
                eval_dir=eval_dir,
                processor=run.processor,
                pipeline=prepared.pipeline,
                console=self._silent_console,
                ranks=run.ranks,
            )


def _make_dataset_context(options: BenchmarkConfig, config: Config, base_dir: Path, work_dir: Path) -> DatasetContext:
    folders = benchmark_folders(options.data, options.media_root, base_dir)
    media_policy = make_media_policy(
        config.data.media_limits, (work_dir, *folders), schemes=("data",), media=config.media
    )
    return DatasetContext(work_dir=work_dir, base_dir=base_dir, seed=config.run.seed, media_policy=media_policy)


def _report_metrics(options: BenchmarkConfig, report: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a report, by their names in metrics.jsonl."""
    values = {
        "accuracy": report["strict"]["value"],
        "official_accuracy": report["official"]["value"],
        # Where a rule gives partial credit, as ANLS does, the accuracy counts full marks alone.
        "official_score": report["score"],
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
