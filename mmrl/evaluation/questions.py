"""What is asked in an exam, and how answers are marked: the files of a benchmark, or a run's own held-out data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Final

from mmrl.benchmarks.readers.questions import BenchmarkQuestions, questions_from_samples, read_questions
from mmrl.benchmarks.registry import get_benchmark
from mmrl.config import Config, EvalConfig
from mmrl.data.context import make_dataset_context
from mmrl.data.load import read_source, separate_rejected, sources_by_split
from mmrl.evaluation.graders import CORRECT_TERM, Grader, RewardGrader, RuleGrader, RuleScorer
from mmrl.policy.build import build_response_format
from mmrl.ports import RewardScorer
from mmrl.scoring import RewardFunctionScorer as Rewarding
from mmrl.scoring.build import build_scorer
from mmrl.types import CoordinateSystem, Corruption, DatasetContext, MediaPolicy, Sample, UserError

RUN_DATA_PREFIX: Final = "run:"
"""Begins the name of a run's own data, as --bench takes it."""
_RUN_DATA_PARTS: Final = ("validation", "test", "train")
_DEFAULT_SPLITS: Final = {
    "mathvista": "testmini",
    "mathverse": "testmini",
    "mathvision": "testmini",
    "mmmu": "validation",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSet:
    """Questions and their marking. Steps of a program ask `judge` whether a response is right, for the terms `terms`.

    `rewards` has processes to end, where there are some.
    """

    name: str
    questions: BenchmarkQuestions
    grader: Grader
    scorer: RewardScorer
    term_names: Sequence[str]
    media_policy: MediaPolicy
    reward_scorer: Rewarding | None = None

    def close(self) -> None:
        """End the processes of rewards."""
        if self.reward_scorer is not None:
            self.reward_scorer.close()


def read_benchmark_files(
    benchmark: str,
    paths: Sequence[str],
    dataset_context: DatasetContext,
    *,
    split: str | None,
    media_root: str | None,
    coordinate_system: CoordinateSystem | None,
) -> BenchmarkQuestions:
    """The questions of the files of a benchmark, of its usual split where none is named; raises as `read_questions`."""
    usual = _DEFAULT_SPLITS.get(benchmark, "test")
    return read_questions(
        benchmark,
        paths,
        dataset_context,
        split=split or usual,
        media_root=media_root,
        coordinate_system=coordinate_system,
    )


def benchmark_question_set(
    name: str, benchmark: str, questions: BenchmarkQuestions, media_policy: MediaPolicy
) -> QuestionSet:
    """Questions that a benchmark's rules mark."""
    marking = RuleGrader(benchmark=get_benchmark(benchmark), items=questions.items)
    ids = {each.sample.id: each.item.id for each in questions.entries if each.sample}
    judge = RuleScorer(grader=marking, item_ids=ids)
    return QuestionSet(
        name=name,
        questions=questions,
        grader=marking,
        scorer=judge,
        term_names=(CORRECT_TERM,),
        media_policy=media_policy,
    )


def run_question_set(name: str, config: Config, eval_config: EvalConfig, base_dir: Path, out_dir: Path) -> QuestionSet:
    """The samples of a part of a run's own data, which its rewards judge.

    Raises:
        UserError: there is no such part, or it cannot be used.
    """
    part = name.removeprefix(RUN_DATA_PREFIX)
    if part not in _RUN_DATA_PARTS:
        raise UserError(f"--bench {name}: a run has {', '.join(RUN_DATA_PREFIX + part for part in _RUN_DATA_PARTS)}")
    place = make_dataset_context(config, base_dir, out_dir / "data")
    samples, rejects = separate_rejected(
        chain.from_iterable(read_source(origin, place) for origin in sources_by_split(config.data)[part])
    )
    if rejects:
        raise UserError(f"{len(rejects)} samples cannot be used, {rejects[0].id} for one: {rejects[0].reason}")
    if not samples:
        raise UserError(f"--bench {name}: the run has no data.{part}")
    questions, judge = questions_from_samples(samples), build_scorer(config, base_dir)
    return QuestionSet(
        name=name,
        questions=questions,
        grader=RewardGrader(
            name=name,
            scorer=judge,
            response_format=build_response_format(eval_config),
            samples={sample.id: sample for sample in samples},
            items=questions.items,
        ),
        scorer=judge,
        term_names=tuple(judge.term_weights),
        media_policy=place.media_policy,
        reward_scorer=judge,
    )


def hide_media(question_set: QuestionSet, method: str) -> QuestionSet:
    """The same with nothing to see.

    Raises:
        UserError: a question cannot be asked like that.
    """
    hidden: Mapping[str, Sample] = {
        sample.id: _hide_sample_media(sample, method) for sample in question_set.questions.samples
    }
    questions = tuple(
        each if each.sample is None else replace(each, sample=hidden[each.sample.id])
        for each in question_set.questions.entries
    )
    return replace(question_set, questions=replace(question_set.questions, entries=questions))


def _hide_sample_media(sample: Sample, method: str) -> Sample:
    """A sample without anything to see."""
    if method == "left_out":
        if sample.target.coordinate_system is not None:
            raise UserError(f"blind=left_out: {sample.id} asks where something is in a picture; take blind=grey")
        return replace(sample, parts=tuple(part for part in sample.parts if isinstance(part, str)))
    veil = Corruption(method)
    return replace(
        sample, parts=tuple(part if isinstance(part, str) else replace(part, corruption=veil) for part in sample.parts)
    )
