"""What is asked in an exam, and how answers are marked: the files of a benchmark, or a run's own held-out data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Final

from mmrl.benchmarks.readers.questions import Questions, from_samples, read_questions
from mmrl.benchmarks.registry import bench_of
from mmrl.config import Config, Exam
from mmrl.data.load import divided, place_of, read, sources
from mmrl.evaluation.graders import RIGHT, ByRewards, ByRule, Marking, RuleJudge
from mmrl.policy.build import grammar_of
from mmrl.ports import Judge
from mmrl.scoring import Judge as Rewarding
from mmrl.scoring.build import judge_of
from mmrl.types import Access, Frame, Place, Sample, UserError, Veil

OF_RUN: Final = "run:"
"""Begins the name of a run's own data, as --bench takes it."""
_PARTS: Final = ("validation", "test", "train")
_SPLITS: Final = {"mathvista": "testmini", "mathverse": "testmini", "mathvision": "testmini", "mmmu": "validation"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Questions and their marking. Steps of a program ask `judge` whether a response is right, for the terms `terms`.

    `rewards` has processes to end, where there are some.
    """

    name: str
    questions: Questions
    marking: Marking
    judge: Judge
    terms: Sequence[str]
    access: Access
    rewards: Rewarding | None = None

    def close(self) -> None:
        """End the processes of rewards."""
        if self.rewards is not None:
            self.rewards.close()


def read_files(
    bench: str, paths: Sequence[str], place: Place, *, split: str | None, media: str | None, frame: Frame | None
) -> Questions:
    """The questions of the files of a benchmark, of its usual split where none is named; raises as `read_questions`."""
    usual = _SPLITS.get(bench, "test")
    return read_questions(bench, paths, place, split=split or usual, media=media, frame=frame)


def by_rule(name: str, bench: str, questions: Questions, access: Access) -> Asked:
    """Questions that a benchmark's rules mark."""
    marking = ByRule(bench=bench_of(bench), items=questions.items)
    ids = {each.sample.id: each.item.id for each in questions.asked if each.sample}
    judge = RuleJudge(marking=marking, ids=ids)
    return Asked(name=name, questions=questions, marking=marking, judge=judge, terms=(RIGHT,), access=access)


def of_run(name: str, config: Config, exam: Exam, base: Path, out: Path) -> Asked:
    """The samples of a part of a run's own data, which its rewards judge.

    Raises:
        UserError: there is no such part, or it cannot be used.
    """
    part = name.removeprefix(OF_RUN)
    if part not in _PARTS:
        raise UserError(f"--bench {name}: a run has {', '.join(OF_RUN + part for part in _PARTS)}")
    place = place_of(config, base, out / "data")
    samples, rejects = divided(chain.from_iterable(read(origin, place) for origin in sources(config.data)[part]))
    if rejects:
        raise UserError(f"{len(rejects)} samples cannot be used, {rejects[0].id} for one: {rejects[0].reason}")
    if not samples:
        raise UserError(f"--bench {name}: the run has no data.{part}")
    questions, judge = from_samples(samples), judge_of(config, base)
    return Asked(
        name=name,
        questions=questions,
        marking=ByRewards(
            name=name,
            judge=judge,
            grammar=grammar_of(exam),
            samples={sample.id: sample for sample in samples},
            items=questions.items,
        ),
        judge=judge,
        terms=tuple(judge.weights),
        access=place.access,
        rewards=judge,
    )


def blinded(asked: Asked, how: str) -> Asked:
    """The same with nothing to see.

    Raises:
        UserError: a question cannot be asked like that.
    """
    hidden: Mapping[str, Sample] = {sample.id: _hidden(sample, how) for sample in asked.questions.samples}
    questions = tuple(
        each if each.sample is None else replace(each, sample=hidden[each.sample.id]) for each in asked.questions.asked
    )
    return replace(asked, questions=replace(asked.questions, asked=questions))


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
