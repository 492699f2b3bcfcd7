"""`mmrl eval MODEL`: from a model, a benchmark and settings to predictions, verdicts and a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mmrl.benchmarks.llm_judge import judged
from mmrl.benchmarks.predictions import Prediction
from mmrl.benchmarks.report.report import Run
from mmrl.benchmarks.score_files import flipped, write
from mmrl.benchmarks.verdict import Verdict, read_verdicts
from mmrl.checkpoint.hf_export import SETTINGS
from mmrl.config import Exam, exam_of
from mmrl.config.schema.eval_command import ExamJudge
from mmrl.data.load import access_of, folders_of
from mmrl.distributed.ranks import Alone
from mmrl.evaluation.model_under_test import Candidate, Examinee, enter, find
from mmrl.evaluation.provenance import made_of, made_with
from mmrl.evaluation.questions import OF_RUN, Asked, blinded, by_rule, of_run, read_files
from mmrl.evaluation.session import Desk, Paper, Room, paper_of, program_of, refuse_missing, sit, unaskable
from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir
from mmrl.rollout.factory import Samplers
from mmrl.rollout.tools.replies import Workshop
from mmrl.scoring import registry
from mmrl.types import Frame, Place, UserError
from mmrl_rewards.services.judge import JudgeService


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for on the command line; `split`, `media`, `frame` and `checkpoint` may be left open."""

    model: str
    bench: str
    data: Sequence[str]
    out: Path
    overrides: Sequence[str] = ()
    engine: str | None = None
    checkpoint: str | None = None
    split: str | None = None
    media: str | None = None
    frame: Frame | None = None
    allow_missing: bool = False
    rescore: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The report, and the verdicts that marking again changed, old and new."""

    report: Mapping[str, Any]
    flips: Sequence[tuple[Verdict, Verdict]] = ()


def evaluate(request: Request, console: Console) -> Result:
    """Do what of an evaluation is not done yet, and mark it.

    Raises:
        UserError: something the user can put right; predictions so far are kept.
    """
    candidate = find(request.model, request.checkpoint, console.warn)
    if candidate.config is None:
        console.say(f"{request.model} has no {SETTINGS}: prompt, pixels and limits are the defaults, unless set here")
    engine = [f"rollout.engine={request.engine}"] if request.engine else []
    given = candidate.settings(by_rule=not request.bench.startswith(OF_RUN))
    exam = exam_of(given, request.model, [*engine, *request.overrides])
    with RunDir(request.out).locked(), closing(_asked(request, candidate, exam)) as asked:
        return _Examination(request, candidate, exam, asked, console).finish()


class _Examination:
    """The model, loaded once and only where something is to be asked."""

    def __init__(self, request: Request, candidate: Candidate, exam: Exam, asked: Asked, console: Console) -> None:
        self._request, self._candidate, self._exam = request, candidate, exam
        self._asked, self._console = asked, console
        self._desk = Desk(request.out)

    def finish(self) -> Result:
        """Answer what is left, and mark all. Raises UserError where the folder holds another evaluation."""
        request, asked, exam = self._request, self._asked, self._exam
        of = made_of(asked.name, self._candidate.revision(), asked.questions, exam)
        before = self._desk.claim(of)
        missing: Mapping[str, str] = before["missing"] if before else self._begun(of)
        size = exam.evaluation.batch_size
        paper = paper_of(asked.questions, missing, batch=size, repeats=exam.samples)
        answered = paper.answered(self._desk)
        if not paper.is_complete(answered):
            self._refuse_rescore()
            answered = self._sit(paper, answered)
        known = (request.out / "verdicts.jsonl").exists()
        old = read_verdicts(request.out) if known else []
        told = made_with(request.model, request.data, of, exam, questions=asked.questions, predictions=answered)
        run = asked.marking.run(answered, told)
        run = self._judged(run, exam.judge) if exam.judge else run
        flips = flipped(old, run.verdicts)
        if flips and not request.rescore:
            raise UserError(
                f"{request.out}: {len(flips)} verdicts of an earlier version differ, that of {flips[0][1].id} for one; "
                "--rescore replaces them"
            )
        return Result(report=write(run, request.out, rescore=True), flips=flips)

    def _judged(self, run: Run, options: ExamJudge) -> Run:
        """With what a judge says; its replies are kept, so that marking again asks nobody twice."""
        cache = str(self._desk.path / "judge")
        run = judged(run, JudgeService(**options.model_dump(exclude={"at_once"}), cache=cache), at_once=options.at_once)
        if run.judging and run.judging.failures:
            failures = run.judging.failures
            self._console.warn(f"the judge said nothing of {len(failures)} responses: {failures[0]}")
        return run

    @cached_property
    def _examinee(self) -> Examinee:
        self._console.say(f"Loading {self._candidate.name} ...")
        return enter(self._candidate, self._exam, self._asked.access)

    def _refuse_rescore(self) -> None:
        if self._request.rescore:
            raise UserError(f"{self._request.out} is not finished; leave out --rescore to go on with it")

    def _begun(self, of: Mapping[str, Any]) -> dict[str, str]:
        """Begin; returns the questions that cannot be asked."""
        self._refuse_rescore()
        found = unaskable(self._asked.questions, self._examinee.processor.encoder.measure)
        refuse_missing(
            found,
            self._asked.questions,
            allowed=self._request.allow_missing,
            remedy="--allow-missing",
            warn=self._console.warn,
        )
        self._desk.begin(of, found)
        return found

    def _sit(self, paper: Paper, answered: Sequence[Prediction]) -> list[Prediction]:
        """Answer what is left."""
        examinee, ranks = self._examinee, Alone()
        workshop = Workshop(partial(registry.find_tool, Path.cwd()))
        samplers = Samplers(
            self._exam,
            examinee.policy,
            examinee.processor,
            adapter=examinee.adapter,
            run_dir=RunDir(self._request.out),
            ranks=ranks,
            warn=self._console.warn,
        )
        with closing(samplers), closing(workshop):
            samplers.follow(0)
            program = program_of(
                self._exam,
                self._asked,
                samplers=samplers,
                processor=examinee.processor,
                banned=examinee.banned,
                workshop=workshop,
            )
            room = Room(
                name=self._asked.name,
                desk=self._desk,
                processor=examinee.processor,
                program=program,
                marking=self._asked.marking,
                console=self._console,
                ranks=ranks,
            )
            return sit(paper, answered, room)


def _asked(request: Request, candidate: Candidate, exam: Exam) -> Asked:
    """What is asked for: a part of a run's own data, or the files of a benchmark."""
    if request.bench.startswith(OF_RUN):
        if candidate.config is None:
            raise UserError(f"--bench {request.bench}: {request.model} has no {SETTINGS}, so it has no data of its own")
        if exam.judge is not None:
            raise UserError(f"--bench {request.bench}: the run's rewards judge its data; leave out judge")
        base = Path(request.data[0]) if request.data else Path.cwd()
        asked = of_run(request.bench, candidate.config, exam, base, request.out)
    else:
        asked = _of_files(request, exam)
    return blinded(asked, exam.blind) if exam.blind else asked


def _of_files(request: Request, exam: Exam) -> Asked:
    if not request.data:
        raise UserError(f"--data: where are the files of {request.bench}? Nothing is fetched")
    folders = folders_of(request.data, request.media, Path.cwd())
    access = access_of(exam.limits, (*folders, request.out), schemes=("data",))
    place = Place(work=request.out.absolute(), base=Path.cwd(), seed=exam.run.seed, access=access)
    try:
        questions = read_files(
            request.bench, request.data, place, split=request.split, media=request.media, frame=request.frame
        )
    except UserError as error:
        raise UserError(f"--data: {error}") from error
    return by_rule(request.bench, request.bench, questions, access)
