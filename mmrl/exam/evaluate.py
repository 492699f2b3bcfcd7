"""`mmrl eval MODEL`: from a model, a benchmark and settings to predictions, verdicts and a report."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

from mmrl import catalogue
from mmrl.algo.seeds import derive
from mmrl.bench.benches import bench_of
from mmrl.bench.predictions import Prediction
from mmrl.bench.questions import Questions, from_samples, read_questions
from mmrl.bench.score import flipped, write
from mmrl.bench.verdict import Verdict, read_verdicts
from mmrl.build import grammar_of
from mmrl.config import Exam, exam_of, settings
from mmrl.exam.candidate import Candidate, Examinee, enter, find
from mmrl.exam.marking import RIGHT, ByRewards, ByRule, Marking, RuleJudge
from mmrl.exam.sitting import Desk, Paper, Room, paper_of, refuse_missing, sit, unaskable
from mmrl.intake import divided, place_of, read, sources
from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir
from mmrl.ports import Judge
from mmrl.ranks import Alone
from mmrl.rollout.compose import Kit, check, compose
from mmrl.rollout.weights import PolicyWeights
from mmrl.samplers import Samplers, law_of
from mmrl.score import Judge as Rewarding
from mmrl.scoring import judge_of
from mmrl.types import Access, Place, Sample, UserError, Veil

_OF_RUN: Final = "run:"
_PARTS: Final = ("validation", "test", "train")
_SPLITS: Final = {"mathvista": "testmini", "mathverse": "testmini", "mathvision": "testmini", "mmmu": "validation"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for on the command line; `split`, `media` and `checkpoint` may be left open."""

    model: str
    bench: str
    data: Sequence[str]
    out: Path
    overrides: Sequence[str] = ()
    engine: str | None = None
    checkpoint: str | None = None
    split: str | None = None
    media: str | None = None
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
    engine = [f"rollout.engine={request.engine}"] if request.engine else []
    exam = exam_of(candidate.settings(), request.model, [*engine, *request.overrides])
    with RunDir(request.out).locked():
        asked = _Asked(request, candidate, exam)
        made_of = {
            "bench": request.bench,
            "model": candidate.revision(),
            "data": asked.questions.digest(),
            **settings(exam.model_dump(mode="json", exclude={"model": {"path"}})),
        }
        with closing(asked):
            return _Examination(request, asked, console).finish(made_of)


class _Asked:
    """The questions, and how answers are marked."""

    def __init__(self, request: Request, candidate: Candidate, exam: Exam) -> None:
        self.candidate, self.exam, self.out = candidate, exam, request.out
        self.bench = request.bench
        self._judge = None
        if request.bench.startswith(_OF_RUN):
            self.questions, self.access, self._judge = _of_run(request, candidate)
            samples = {sample.id: sample for sample in self.questions.samples}
            self.marking: Marking = ByRewards(
                name=request.bench,
                judge=self._judge,
                grammar=grammar_of(exam),
                samples=samples,
                items=self.questions.items,
            )
            self.judge: Judge = self._judge
            self.terms: Sequence[str] = tuple(self._judge.weights)
        else:
            self.questions, self.access = _of_files(request, exam)
            self.marking = by_rule = ByRule(bench=bench_of(request.bench), items=self.questions.items)
            ids = {each.sample.id: each.item.id for each in self.questions.asked if each.sample}
            self.judge, self.terms = RuleJudge(marking=by_rule, ids=ids), (RIGHT,)
        if exam.blind:
            self.questions = _blind(self.questions, exam.blind)

    def paper(self, missing: Mapping[str, str]) -> Paper:
        """What can be asked."""
        return paper_of(self.questions, missing, batch=self.exam.evaluation.batch_size, repeats=self.exam.samples)

    def close(self) -> None:
        """End the processes of rewards."""
        if self._judge is not None:
            self._judge.close()


class _Examination:
    """The model, loaded once and only where something is to be asked."""

    def __init__(self, request: Request, asked: _Asked, console: Console) -> None:
        self._request, self._asked, self._console = request, asked, console
        self._desk = Desk(request.out)

    def finish(self, made_of: Mapping[str, Any]) -> Result:
        """Answer what is left, and mark all. Raises UserError where the folder holds another evaluation."""
        request, asked = self._request, self._asked
        before = self._desk.claim(made_of)
        missing: Mapping[str, str] = before["missing"] if before else self._begun(made_of)
        paper = asked.paper(missing)
        answered = paper.answered(self._desk)
        if not paper.is_complete(answered):
            self._refuse_rescore()
            answered = self._sit(paper, answered)
        known = (request.out / "verdicts.jsonl").exists()
        old = read_verdicts(request.out) if known else []
        told = {**_told(request, made_of, asked.exam), "left_out": asked.questions.left_out}
        run = asked.marking.run(answered, {**told, "prompts": _prompts(answered)})
        flips = flipped(old, run.verdicts)
        if flips and not request.rescore:
            raise UserError(
                f"{request.out}: {len(flips)} verdicts of an earlier version differ, that of {flips[0][1].id} for one; "
                "--rescore replaces them"
            )
        return Result(report=write(run, request.out, rescore=True), flips=flips)

    @cached_property
    def _examinee(self) -> Examinee:
        self._console.say(f"Loading {self._asked.candidate.name} ...")
        return enter(self._asked.candidate, self._asked.exam, self._asked.access)

    def _refuse_rescore(self) -> None:
        if self._request.rescore:
            raise UserError(f"{self._request.out} is not finished; leave out --rescore to go on with it")

    def _begun(self, made_of: Mapping[str, Any]) -> dict[str, str]:
        """Begin; returns the questions that cannot be asked."""
        self._refuse_rescore()
        found = unaskable(self._asked.questions, self._examinee.processor.encoder.measure)
        count = len(self._asked.questions.asked)
        if left_out := self._asked.questions.left_out:
            self._console.warn(f"{left_out} of {count + left_out} rows are left out: no rule scores them")
        refuse_missing(found, count, allowed=self._request.allow_missing, warn=self._console.warn)
        self._desk.begin(made_of, found)
        return found

    def _sit(self, paper: Paper, answered: Sequence[Prediction]) -> list[Prediction]:
        """Answer what is left."""
        exam, asked, examinee = self._asked.exam, self._asked, self._examinee
        processor = examinee.processor
        find_tool = partial(catalogue.find_tool, Path.cwd())
        check(exam.evaluation.program, processor, examinee.banned, asked.terms, find_tool)
        samplers = Samplers(
            exam,
            examinee.policy,
            processor,
            weights=PolicyWeights(examinee.policy),
            adapter=examinee.adapter,
            run_dir=RunDir(asked.out),
            ranks=Alone(),
        )
        with closing(samplers):
            samplers.follow(0)
            kit = Kit(
                sampler=samplers.sampler(exam.run.seed, "evaluation"),
                judge=asked.judge,
                processor=processor,
                law=law_of(exam, examinee.banned, processor.grammar.stop),
                group_size=exam.samples,
                groups=exam.evaluation.batch_size,
                seed=derive(exam.run.seed, "evaluation"),
                find_tool=find_tool,
            )
            room = Room(
                name=asked.bench,
                desk=self._desk,
                processor=processor,
                program=compose(exam.evaluation.program, kit),
                marking=asked.marking,
                console=self._console,
            )
            return sit(paper, answered, room)


def _of_files(request: Request, exam: Exam) -> tuple[Questions, Access]:
    """The questions of the files of a benchmark."""
    if not request.data:
        raise UserError(f"--data: where are the files of {request.bench}? Nothing is fetched")
    local = [Path(path) for path in request.data if "://" not in path]
    folders = [path if path.is_dir() else path.parent for path in local] + [request.out]
    folders += [Path(request.media)] if request.media else []
    limits = exam.limits
    access = Access(
        roots=tuple(folder.resolve() for folder in folders),
        schemes=("data",),
        max_bytes=limits.max_bytes,
        max_video_bytes=limits.max_video_bytes,
        max_data_url_bytes=limits.max_data_url_bytes,
    )
    place = Place(work=request.out.absolute(), base=Path.cwd(), seed=exam.run.seed, access=access)
    split = request.split or _SPLITS.get(request.bench, "test")
    return read_questions(request.bench, request.data, place, split=split, media=request.media), access


def _of_run(request: Request, candidate: Candidate) -> tuple[Questions, Access, Rewarding]:
    """The samples of a part of the run's own data, which its rewards judge."""
    part, config = request.bench.removeprefix(_OF_RUN), candidate.config
    if part not in _PARTS:
        raise UserError(f"--bench {request.bench}: a run has {', '.join(_OF_RUN + name for name in _PARTS)}")
    if config is None:
        raise UserError(f"--bench {request.bench}: {request.model} is no run, so it has no data of its own")
    base = Path(request.data[0]) if request.data else Path.cwd()
    place = place_of(config, base, request.out / "data")
    origins = sources(config.data)[part]
    samples, rejects = divided(chain.from_iterable(read(origin, place) for origin in origins))
    if rejects:
        raise UserError(f"{len(rejects)} samples cannot be used, {rejects[0].id} for one: {rejects[0].reason}")
    if not samples:
        raise UserError(f"--bench {request.bench}: the run has no data.{part}")
    return from_samples(samples), place.access, judge_of(config, base)


def _blind(questions: Questions, how: str) -> Questions:
    asked = tuple(
        question if question.sample is None else replace(question, sample=_hidden(question.sample, how))
        for question in questions.asked
    )
    return replace(questions, asked=asked)


def _hidden(sample: Sample, how: str) -> Sample:
    """A sample without anything to see."""
    if how == "left_out":
        if sample.target.frame is not None:
            raise UserError(f"blind=left_out: {sample.id} asks where something is in a picture; take blind=grey")
        return replace(sample, parts=tuple(part for part in sample.parts if isinstance(part, str)))
    veil = Veil(how)
    return replace(
        sample, parts=tuple(part if isinstance(part, str) else replace(part, veil=veil) for part in sample.parts)
    )


def _prompts(predictions: Sequence[Prediction]) -> str:
    """A hash over everything that the model read: words, pictures, positions."""
    return hashlib.sha256("".join(one.prompt for one in predictions).encode()).hexdigest()


def _told(request: Request, made_of: Mapping[str, Any], exam: Exam) -> dict[str, Any]:
    """How the responses were made, for the report."""
    law = exam.evaluation
    return {
        "model": request.model,
        "revision": made_of["model"],
        "data": list(request.data),
        "data_sha256": made_of["data"],
        "pixels": [exam.model.min_pixels, exam.model.max_pixels],
        "dtype": exam.model.dtype,
        "engine": exam.rollout.engine,
        "temperature": law.temperature,
        "top_p": exam.top_p,
        "top_k": exam.top_k,
        "max_new_tokens": law.max_new_tokens,
        "stop": list(grammar_of(exam).stop),
        "samples": exam.samples,
        "seed": exam.run.seed,
        "answer": exam.answer.model_dump(mode="json"),
        "program": [step.model_dump(mode="json") for step in law.program],
        "blind": exam.blind,
    }
