"""`mmrl eval MODEL`: from a model, a benchmark and settings to predictions, verdicts and a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mmrl.benchmarks.llm_judge import add_judge_verdicts
from mmrl.benchmarks.predictions import Prediction
from mmrl.benchmarks.report.report import ScoredRun
from mmrl.benchmarks.score_files import changed_verdicts, write_report
from mmrl.benchmarks.verdict import Verdict, read_verdicts
from mmrl.checkpoint.hf_export import RUN_CONFIG_FILE
from mmrl.config import EvalConfig, load_eval_config
from mmrl.config.schema.eval_command import LlmJudgeConfig
from mmrl.data.context import benchmark_folders, make_media_policy
from mmrl.distributed.ranks import SingleProcess
from mmrl.evaluation.model_under_test import LoadedModel, ModelSource, find_model_source, load_model
from mmrl.evaluation.provenance import describe_generation, evaluation_identity
from mmrl.evaluation.questions import (
    RUN_DATA_PREFIX,
    QuestionSet,
    benchmark_question_set,
    hide_media,
    read_benchmark_files,
    run_question_set,
)
from mmrl.evaluation.session import (
    EvalBatches,
    EvalDir,
    EvalSession,
    build_eval_pipeline,
    check_missing,
    find_unusable_questions,
    make_batches,
    run_session,
)
from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir
from mmrl.rollout.factory import SamplerFactory
from mmrl.rollout.tools.replies import ToolRunner
from mmrl.scoring import registry
from mmrl.types import CoordinateSystem, DatasetContext, UserError
from mmrl_rewards.services.judge import JudgeService


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """What is asked for on the command line; `split`, `media`, `frame` and `checkpoint` may be left open."""

    model: str
    benchmark: str
    data_files: Sequence[str]
    out_dir: Path
    overrides: Sequence[str] = ()
    engine: str | None = None
    checkpoint: str | None = None
    split: str | None = None
    media_root: str | None = None
    coordinate_system: CoordinateSystem | None = None
    allow_missing: bool = False
    rescore: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """The report, and the verdicts that marking again changed, old and new."""

    report: Mapping[str, Any]
    changed_verdicts: Sequence[tuple[Verdict, Verdict]] = ()


def evaluate(request: EvalRequest, console: Console) -> EvalResult:
    """Do what of an evaluation is not done yet, and mark it.

    Raises:
        UserError: something the user can put right; predictions so far are kept.
    """
    candidate = find_model_source(request.model, request.checkpoint, console.warn)
    if candidate.config is None:
        console.info(
            f"{request.model} has no {RUN_CONFIG_FILE}: prompt, pixels and limits are the defaults, unless set here"
        )
    engine = [f"rollout.engine={request.engine}"] if request.engine else []
    given = candidate.inherited_settings(by_rule=not request.benchmark.startswith(RUN_DATA_PREFIX))
    exam = load_eval_config(given, request.model, [*engine, *request.overrides])
    with RunDir(request.out_dir).lock(), closing(_make_question_set(request, candidate, exam)) as asked:
        return _EvalCommand(request, candidate, exam, asked, console).run()


class _EvalCommand:
    """The model, loaded once and only where something is to be asked."""

    def __init__(
        self,
        request: EvalRequest,
        model_source: ModelSource,
        eval_config: EvalConfig,
        question_set: QuestionSet,
        console: Console,
    ) -> None:
        self._request, self._model_source, self._eval_config = request, model_source, eval_config
        self._question_set, self._console = question_set, console
        self._eval_dir = EvalDir(request.out_dir)

    def run(self) -> EvalResult:
        """Answer what is left, and mark all. Raises UserError where the folder holds another evaluation."""
        request, asked, exam = self._request, self._question_set, self._eval_config
        of = evaluation_identity(asked.name, self._model_source.revision(), asked.questions, exam)
        before = self._eval_dir.claim(of)
        missing: Mapping[str, str] = before["missing"] if before else self._start(of)
        size = exam.evaluation.batch_size
        paper = make_batches(
            asked.questions, missing, batch_size=size, responses_per_question=exam.responses_per_question
        )
        answered = paper.read_predictions(self._eval_dir)
        if not paper.is_complete(answered):
            self._refuse_rescore()
            answered = self._answer_remaining(paper, answered)
        known = (request.out_dir / "verdicts.jsonl").exists()
        old = read_verdicts(request.out_dir) if known else []
        told = describe_generation(
            request.model, request.data_files, of, exam, questions=asked.questions, predictions=answered
        )
        run = asked.grader.grade_run(answered, told)
        run = self._add_judge_verdicts(run, exam.judge) if exam.judge else run
        flips = changed_verdicts(old, run.verdicts)
        if flips and not request.rescore:
            raise UserError(
                f"{request.out_dir}: {len(flips)} verdicts of an earlier version differ, that of {flips[0][1].id} for one; "
                "--rescore replaces them"
            )
        return EvalResult(report=write_report(run, request.out_dir, rescore=True), changed_verdicts=flips)

    def _add_judge_verdicts(self, run: ScoredRun, options: LlmJudgeConfig) -> ScoredRun:
        """With what a judge says; its replies are kept, so that marking again asks nobody twice."""
        cache = str(self._eval_dir.path / "judge")
        run = add_judge_verdicts(
            run,
            JudgeService(**options.model_dump(exclude={"max_concurrency"}), cache=cache),
            max_concurrent=options.max_concurrency,
        )
        if run.judge_summary and run.judge_summary.failures:
            failures = run.judge_summary.failures
            self._console.warn(f"the judge said nothing of {len(failures)} responses: {failures[0]}")
        return run

    @cached_property
    def _loaded_model(self) -> LoadedModel:
        self._console.info(f"Loading {self._model_source.name} ...")
        return load_model(self._model_source, self._eval_config, self._question_set.media_policy)

    def _refuse_rescore(self) -> None:
        if self._request.rescore:
            raise UserError(f"{self._request.out_dir} is not finished; leave out --rescore to go on with it")

    def _start(self, identity: Mapping[str, Any]) -> dict[str, str]:
        """Begin; returns the questions that cannot be asked."""
        self._refuse_rescore()
        found = find_unusable_questions(self._question_set.questions, self._loaded_model.processor.encoder.measure)
        check_missing(
            found,
            self._question_set.questions,
            allowed=self._request.allow_missing,
            remedy="--allow-missing",
            warn=self._console.warn,
        )
        self._eval_dir.write_settings(identity, found)
        return found

    def _answer_remaining(self, batches: EvalBatches, answered: Sequence[Prediction]) -> list[Prediction]:
        """Answer what is left."""
        examinee, ranks = self._loaded_model, SingleProcess()
        workshop = ToolRunner(partial(registry.load_tool, Path.cwd()))
        samplers = SamplerFactory(
            self._eval_config,
            examinee.policy,
            examinee.processor,
            adapter=examinee.adapter,
            run_dir=RunDir(self._request.out_dir),
            ranks=ranks,
            warn=self._console.warn,
        )
        with closing(samplers), closing(workshop):
            samplers.sync_weights(0)
            program = build_eval_pipeline(
                self._eval_config,
                self._question_set,
                samplers=samplers,
                processor=examinee.processor,
                banned_token_ids=examinee.banned_token_ids,
                tool_runner=workshop,
            )
            room = EvalSession(
                name=self._question_set.name,
                eval_dir=self._eval_dir,
                processor=examinee.processor,
                pipeline=program,
                grader=self._question_set.grader,
                console=self._console,
                ranks=ranks,
            )
            return run_session(batches, answered, room)


def _make_question_set(request: EvalRequest, model_source: ModelSource, eval_config: EvalConfig) -> QuestionSet:
    """What is asked for: a part of a run's own data, or the files of a benchmark."""
    if request.benchmark.startswith(RUN_DATA_PREFIX):
        if model_source.config is None:
            raise UserError(
                f"--bench {request.benchmark}: {request.model} has no {RUN_CONFIG_FILE}, so it has no data of its own"
            )
        if eval_config.judge is not None:
            raise UserError(f"--bench {request.benchmark}: the run's rewards judge its data; leave out judge")
        base = Path(request.data_files[0]) if request.data_files else Path.cwd()
        asked = run_question_set(request.benchmark, model_source.config, eval_config, base, request.out_dir)
    else:
        asked = _make_file_question_set(request, eval_config)
    return hide_media(asked, eval_config.corruption) if eval_config.corruption else asked


def _make_file_question_set(request: EvalRequest, eval_config: EvalConfig) -> QuestionSet:
    if not request.data_files:
        raise UserError(f"--data: where are the files of {request.benchmark}? Nothing is fetched")
    folders = benchmark_folders(request.data_files, request.media_root, Path.cwd())
    access = make_media_policy(eval_config.media_limits, (*folders, request.out_dir), schemes=("data",))
    place = DatasetContext(
        work_dir=request.out_dir.absolute(), base_dir=Path.cwd(), seed=eval_config.run.seed, media_policy=access
    )
    try:
        questions = read_benchmark_files(
            request.benchmark,
            request.data_files,
            place,
            split=request.split,
            media_root=request.media_root,
            coordinate_system=request.coordinate_system,
        )
    except UserError as error:
        raise UserError(f"--data: {error}") from error
    return benchmark_question_set(request.benchmark, request.benchmark, questions, access)
