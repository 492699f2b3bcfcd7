"""`mmrl eval run`: from a model, a benchmark and settings to predictions, verdicts and a report."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mmrl.benchmarks.compare import changed_verdicts
from mmrl.benchmarks.llm_judge import add_judge_verdicts, keep_judge_verdicts
from mmrl.benchmarks.predictions import Prediction, read_complete_predictions
from mmrl.benchmarks.readers.questions import read_questions
from mmrl.benchmarks.registry import BENCHMARKS, get_benchmark
from mmrl.benchmarks.report import ScoredRun, write_report
from mmrl.benchmarks.verdict import Verdict, read_verdicts
from mmrl.config import EvalConfig
from mmrl.data.context import benchmark_folders
from mmrl.distributed.ranks import SingleProcess
from mmrl.evaluation.eval_dir import RESCORE, EvalDir, evaluation_identity
from mmrl.evaluation.eval_settings import EvalRequest, make_eval_config
from mmrl.evaluation.model_source import LoadedModel, ModelSource, find_model_source, load_model
from mmrl.evaluation.question_set import QuestionSet, hide_media, question_set_of_benchmark, question_set_of_run
from mmrl.evaluation.session import (
    EvalBatches,
    check_missing,
    find_unusable_questions,
    generate_predictions,
    grade_predictions,
    open_pipeline,
)
from mmrl.log.console import Console
from mmrl.log.library_messages import log_library_messages
from mmrl.log.run_dir import EXPORTED_CONFIG_FILE, RunDir
from mmrl.media.checks import make_media_policy
from mmrl.rollout.load import load_rollout_steps
from mmrl.rollout.steps.base import StepFactory
from mmrl.scoring.registry import check_rollout_step_terms
from mmrl.types import DatasetContext, UserError
from mmrl_rewards.services.judge import JudgeService


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """The outcome of an evaluation."""

    report: Mapping[str, Any]  # contents of report.json
    changed_verdicts: Sequence[tuple[Verdict, Verdict]] = ()  # old and new verdict, where grading again changed one


def evaluate(request: EvalRequest, console: Console) -> EvalResult:
    """Generate the responses that are missing in the output folder, grade all, and write the report.

    Raises:
        UserError: the model, files or settings cannot be used; predictions so far are kept.
    """
    model_source = find_model_source(request.model, request.checkpoint, console.warn)
    if request.data_files and request.is_on_run_data:
        model_source = replace(model_source, base_dir=Path(request.data_files[0]).absolute())
    if model_source.config is None:
        console.info(
            f"{request.model} has no {EXPORTED_CONFIG_FILE}: prompt, pixels and limits are the defaults, unless set "
            "here"
        )
    eval_config = make_eval_config(
        request, model_source.path, model_source.config, is_checkpoint=model_source.checkpoint_dir is not None
    )
    out_dir = RunDir(request.out_dir)
    new_folders = [folder for folder in (out_dir.path, *out_dir.path.parents) if not folder.exists()]
    with (
        out_dir.lock(),
        _remove_unless_answered(new_folders, EvalDir(out_dir.path).predictions_file),
        log_library_messages(out_dir.log),
        closing(_make_question_set(request, model_source, eval_config)) as question_set,
    ):
        steps = eval_config.evaluation.rollout_steps
        check_rollout_step_terms(steps, question_set.term_names, key="evaluation.rollout_steps")
        custom_steps, eval_dir = load_rollout_steps(steps, model_source.base_dir), EvalDir(request.out_dir)
        return _EvalCommand(request, model_source, eval_config, question_set, custom_steps, eval_dir, console).run()


@contextmanager
def _remove_unless_answered(new_folders: Sequence[Path], predictions_file: Path) -> Iterator[None]:
    """Remove the folders that this evaluation made, the inner one first, if it fails before the first response."""
    try:
        yield
    except BaseException:
        if new_folders and not predictions_file.exists():
            shutil.rmtree(new_folders[0], ignore_errors=True)
            with suppress(OSError):  # another evaluation may be in a folder by now
                for folder in new_folders[1:]:
                    folder.rmdir()
        raise


@dataclass
class _EvalCommand:
    """One call of `mmrl eval run`. The model is loaded only if a response is missing."""

    request: EvalRequest
    model_source: ModelSource
    eval_config: EvalConfig
    question_set: QuestionSet
    custom_steps: Mapping[str, StepFactory]
    eval_dir: EvalDir
    console: Console

    def run(self) -> EvalResult:
        """Generate the missing responses and grade all of them. A finished evaluation returns its report as it is.

        Raises:
            UserError: the folder holds another evaluation, or verdicts would change without `--rescore`.
        """
        request, questions, eval_config = self.request, self.question_set.questions, self.eval_config
        identity = evaluation_identity(self.question_set.name, self.model_source.revision(), questions, eval_config)
        earlier_start = self.eval_dir.claim(identity)
        missing: Mapping[str, str] = earlier_start["missing"] if earlier_start else self._start(identity)
        batches = EvalBatches(
            questions,
            missing,
            batch_size=eval_config.evaluation.batch_size,
            responses_per_question=eval_config.responses_per_question,
        )
        predictions = read_complete_predictions(self.eval_dir.predictions_file, batches.rows_per_batch)
        earlier_judge: Mapping[str, Any] | None = None  # section `judge` of the report to be written again
        if not batches.is_complete(predictions):
            self._refuse_rescore()
            predictions = self._answer_remaining(batches, predictions)
        # The judge is not part of an evaluation's identity, so it may be added once all responses exist. report.md is
        # the last file that is written, so its presence shows that grading was finished.
        elif eval_config.judge is None and not request.rescore and (request.out_dir / "report.md").exists():
            report = self.eval_dir.read_report()
            if request.benchmark in BENCHMARKS or request.is_on_run_data:
                self.console.info(f"This evaluation is finished. {RESCORE} grades it again.")
                return EvalResult(report=report)
            # A user's rules may have changed since, so they grade again.
            earlier_judge = report.get("judge")
        old_verdicts = read_verdicts(request.out_dir) if (request.out_dir / "verdicts.jsonl").exists() else []
        run = self._grade(identity, predictions)
        if earlier_judge is not None:
            run = keep_judge_verdicts(run, old_verdicts, earlier_judge)
        changed = changed_verdicts(old_verdicts, run.verdicts)
        if changed and not request.rescore:
            raise UserError(
                f"{request.out_dir}: {len(changed)} verdicts of earlier rules differ, that of {changed[0][1].id} "
                f"for one; {RESCORE} replaces them"
            )
        # Verdicts that differ were refused above, so an old report may be replaced.
        return EvalResult(report=write_report(run, request.out_dir, rescore=True), changed_verdicts=changed)

    def _start(self, identity: Mapping[str, Any]) -> dict[str, str]:
        """Write the settings of a new evaluation, and return the questions that cannot be asked."""
        self._refuse_rescore()
        questions = self.question_set.questions
        allowed, warn = self.request.allow_missing, self.console.warn
        remedy = "--allow-missing (Python: allow_missing=True)"
        if not allowed and questions.problems:
            # Loading the model takes a while, so problems that the files alone show are refused first.
            check_missing(questions.problems, questions, allowed=allowed, remedy=remedy, warn=warn)
        missing = find_unusable_questions(questions, self._loaded_model.processor.encoder.measure)
        check_missing(missing, questions, allowed=allowed, remedy=remedy, warn=warn)
        self.eval_dir.write_settings(identity, missing)
        return missing

    def _refuse_rescore(self) -> None:
        if self.request.rescore:
            raise UserError(f"{self.request.out_dir} is not finished; leave out {RESCORE} to continue with it")

    @cached_property
    def _loaded_model(self) -> LoadedModel:
        self.console.info(f"Loading {self.model_source.name} ...")
        loaded = load_model(self.model_source, self.eval_config, self.question_set.media_policy)
        policy = loaded.policy
        slow_path = policy.family.describe_slow_path(policy.model.device, policy.model.dtype)
        if slow_path and self.eval_config.rollout.engine_name == "hf":
            self.console.warn(slow_path)
        return loaded

    def _answer_remaining(self, batches: EvalBatches, earlier: Sequence[Prediction]) -> list[Prediction]:
        model = self._loaded_model
        with open_pipeline(
            self.eval_config,
            model,
            self.question_set.scorer,
            custom_steps=self.custom_steps,
            work_dir=self.request.out_dir,
            console=self.console,
        ) as pipeline:
            return generate_predictions(
                batches,
                earlier,
                question_set=self.question_set,
                eval_dir=self.eval_dir,
                processor=model.processor,
                pipeline=pipeline,
                console=self.console,
                ranks=SingleProcess(),
            )

    def _grade(self, identity: Mapping[str, Any], predictions: Sequence[Prediction]) -> ScoredRun:
        run = grade_predictions(
            self.question_set,
            predictions,
            self.eval_config,
            model=self.request.model,
            data_files=self.request.data_files,
            identity=identity,
        )
        options = self.eval_config.judge
        if options is None:
            return run
        # The judge's replies are kept, so that grading again asks nothing twice.
        cache = str(self.eval_dir.path / "judge")
        service = JudgeService(**options.model_dump(exclude={"max_concurrency"}), cache=cache)
        return add_judge_verdicts(run, service, max_concurrent=options.max_concurrency, warn=self.console.warn)


def _make_question_set(request: EvalRequest, model_source: ModelSource, eval_config: EvalConfig) -> QuestionSet:
    if not request.is_on_run_data:
        question_set = _make_benchmark_question_set(request, eval_config)
    elif model_source.config is None:
        raise UserError(
            f"benchmark {request.benchmark}: {request.model} has no {EXPORTED_CONFIG_FILE}, so it has no data of its "
            "own"
        )
    elif eval_config.judge is not None:
        raise UserError(f"benchmark {request.benchmark}: the run's rewards judge its data; leave out judge")
    else:
        question_set = question_set_of_run(
            request.benchmark, model_source.config, eval_config, model_source.base_dir, request.out_dir
        )
    return hide_media(question_set, eval_config.corruption) if eval_config.corruption else question_set


def _make_benchmark_question_set(request: EvalRequest, eval_config: EvalConfig) -> QuestionSet:
    benchmark = get_benchmark(request.benchmark)
    if not request.data_files:
        raise UserError(f"data: name the files of {benchmark.name}; nothing is downloaded")
    folders = benchmark_folders(request.data_files, request.media_root, Path.cwd())
    media_policy = make_media_policy(
        eval_config.media_limits, (*folders, request.out_dir), schemes=("data",), media=eval_config.media
    )
    dataset_context = DatasetContext(
        work_dir=request.out_dir.absolute(), base_dir=Path.cwd(), seed=eval_config.run.seed, media_policy=media_policy
    )
    try:
        questions = read_questions(
            benchmark,
            request.data_files,
            dataset_context,
            split=request.split,
            media_root=request.media_root,
            coordinate_system=request.coordinate_system,
        )
    except UserError as error:
        raise UserError(f"data: {error}") from error
    return question_set_of_benchmark(benchmark.name, benchmark, questions, media_policy)
