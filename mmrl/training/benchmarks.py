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
from mmrl.benchmarks.readers.questions import Questions
from mmrl.benchmarks.registry import bench_of
from mmrl.benchmarks.score_files import write
from mmrl.config import Config, Exam, exam_of
from mmrl.config.schema import Benchmark
from mmrl.data.load import access_of, folders_of
from mmrl.evaluation.model_under_test import brought
from mmrl.evaluation.provenance import made_of, made_with
from mmrl.evaluation.questions import Asked, by_rule, read_files
from mmrl.evaluation.session import Desk, Room, paper_of, program_of, refuse_missing, sit, unaskable
from mmrl.log.console import silent
from mmrl.ports import Program
from mmrl.training.build import World
from mmrl.types import Place, State, UserError

Moment = Literal["before", "step", "after"]
"""When benchmarks may be due: before a stage, after each of its steps, and as it ends."""


def read_benchmarks(config: Config, base: Path, work: Path) -> tuple[Questions, ...]:
    """The questions of each benchmark; what has no file goes under `work`.

    Raises:
        UserError: there is no such benchmark, or its files cannot be used; the message names it.
    """
    return tuple(read_benchmark(benchmark, config, base, work) for benchmark in config.evaluation.benchmarks)


def read_benchmark(benchmark: Benchmark, config: Config, base: Path, work: Path) -> Questions:
    """The questions of one of them; raises as `read_benchmarks`."""
    try:
        bench_of(benchmark.rules)
        questions = read_files(
            benchmark.rules,
            benchmark.data,
            _place(benchmark, config, base, work),
            split=benchmark.split,
            media=benchmark.media,
            frame=benchmark.frame,
        )
    except UserError as error:
        raise UserError(f"evaluation.benchmarks.{benchmark.name}: {error}") from error
    columns = dict.fromkeys(column for item in questions.items.values() for column in item.groups)
    if unknown := [column for column in benchmark.subsets if column not in columns]:
        raise UserError(
            f"evaluation.benchmarks.{benchmark.name}.subsets: no question has {unknown[0]!r}; they have "
            f"{', '.join(columns) or 'no columns to break results down by'}"
        )
    return questions


def _exam(benchmark: Benchmark, config: Config) -> Exam:
    """The settings of `mmrl eval` that this run brings, for a benchmark."""
    given = brought(config, by_rule=True)
    given["evaluation"]["temperature"] = config.evaluation.temperature_of(benchmark)
    return exam_of({**given, "samples": benchmark.samples}, "the config", ())


def _place(benchmark: Benchmark, config: Config, base: Path, work: Path) -> Place:
    folders = folders_of(benchmark.data, benchmark.media, base)
    access = access_of(config.data.limits, (work, *folders), schemes=("data",))
    return Place(work=work, base=base, seed=config.run.seed, access=access)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """A benchmark that can be taken at any time; `missing` are the questions that cannot be asked."""

    options: Benchmark
    exam: Exam
    asked: Asked
    program: Program
    missing: Mapping[str, str]

    def is_due(self, step: int, moment: Moment) -> bool:
        """Whether it is taken after this step; as a stage ends only where it was not a moment ago."""
        within = self.options.every is not None and step % self.options.every == 0
        return moment == "before" or within == (moment == "step")


class Benchmarks:
    """The benchmarks of a run."""

    def __init__(self, world: World, base: Path, read: Sequence[Questions]) -> None:
        """`read` are the questions of each, as `read_benchmarks` found them.

        Raises:
            UserError: questions cannot be asked, or not with the evaluation's program.
        """
        self._world, config = world, world.config
        self._first = config.stages.index(config.trainings[0])
        self._console = silent()
        every = zip(config.evaluation.benchmarks, read, strict=True)
        self._all = [self._ready(options, questions, base) for options, questions in every]

    def take(self, state: State, moment: Moment) -> dict[str, float]:
        """Metrics of the benchmarks that are due; those that were taken already are read again.

        Raises:
            UserError: the disk is full, or a medium has changed.
        """
        if moment == "before" and (state.step or state.stage != self._first):
            return {}
        due = [ready for ready in self._all if ready.is_due(state.step, moment)]
        revision = checkpoint.fingerprint(self._world.policy.passed()) if due else ""
        return {name: value for ready in due for name, value in self._taken(ready, state, revision).items()}

    def _ready(self, options: Benchmark, questions: Questions, base: Path) -> _Ready:
        world, exam = self._world, _exam(options, self._world.config)
        place = _place(options, world.config, base, world.run_dir.data)
        asked = by_rule(options.name, options.rules, questions, place.access)
        missing = world.ranks.once(partial(self._unaskable, options, questions))
        program = program_of(
            exam,
            asked,
            samplers=world.samplers,
            processor=world.processor,
            banned=world.banned,
            workshop=world.workshop,
        )
        return _Ready(options=options, exam=exam, asked=asked, program=program, missing=missing)

    def _unaskable(self, options: Benchmark, questions: Questions) -> dict[str, str]:
        missing = unaskable(questions, self._world.processor.encoder.measure)
        name = f"evaluation.benchmarks.{options.name}"
        try:
            refuse_missing(
                missing,
                questions,
                allowed=options.allow_missing,
                remedy=f"{name}.allow_missing=true",
                warn=self._world.console.warn,
            )
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        return missing

    def _taken(self, ready: _Ready, state: State, revision: str) -> dict[str, float]:
        """Take a benchmark, or what of it is left; its folder is named as a checkpoint of this moment would be."""
        world, exam, asked, questions = self._world, ready.exam, ready.asked, ready.asked.questions
        place = str(checkpoint.Place(state.stage, state.step))
        desk = Desk(world.run_dir.benchmarks / asked.name / place)
        of = world.ranks.once(lambda: made_of(ready.options.rules, revision, questions, exam))
        world.ranks.once(lambda: desk.own(of, ready.missing))
        size = exam.evaluation.batch_size * world.ranks.size
        paper = paper_of(questions, ready.missing, batch=size, repeats=exam.samples)
        answered = world.ranks.once(lambda: paper.answered(desk))
        if not paper.is_complete(answered):
            world.samplers.follow(state.version)
            room = Room(
                name=asked.name,
                desk=desk,
                processor=world.processor,
                program=ready.program,
                marking=asked.marking,
                console=self._console,
                ranks=world.ranks,
            )
            with world.samplers.whole():
                answered = sit(paper, answered, room)
        model = f"{world.config.run.name}, {place}"
        run = asked.marking.run(
            answered, made_with(model, ready.options.data, of, exam, questions=questions, predictions=answered)
        )
        report = world.ranks.once(lambda: write(run, desk.path, rescore=True))
        self._say(asked.name, state, report)
        return _metrics(ready.options, report)

    def _say(self, name: str, state: State, report: Mapping[str, Any]) -> None:
        strict, compat = report["strict"], report["compat"]["value"]
        low, high = 100 * strict["low"], 100 * strict["high"]
        stage = self._world.config.stages[state.stage].name
        self._world.console.say(
            f"{name} after {state.step} steps of {stage}: strict {100 * strict['value']:.1f} % (95 % from {low:.1f} to "
            f"{high:.1f}), compat {100 * compat:.1f} %"
        )


def _metrics(options: Benchmark, report: Mapping[str, Any]) -> dict[str, float]:
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
    return {f"bench/{options.name}/{name}": float(value) for name, value in told.items()}
