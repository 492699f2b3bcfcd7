"""Questions with their grader: the files of a benchmark, or the held-out data of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mmrl.benchmarks.benchmark import Benchmark
from mmrl.benchmarks.readers.questions import BenchmarkQuestions, questions_from_samples
from mmrl.config import Config, EvalConfig
from mmrl.data.context import make_dataset_context
from mmrl.data.rows import read_filtered_source, separate_rejected
from mmrl.evaluation.eval_settings import RUN_DATA_PREFIX
from mmrl.evaluation.graders import CORRECT_TERM, Grader, RewardGrader, RuleGrader, RuleScorer
from mmrl.media.pixel_reader import PixelReader
from mmrl.policy.build import build_response_format
from mmrl.protocols import EvalScorer
from mmrl.scoring import RewardFunctionScorer
from mmrl.scoring.build import build_scorer
from mmrl.types import Corruption, MediaPolicy, RejectedRow, Sample, UserError

_RUN_DATA_SPLITS: Final = ("validation", "test", "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSet:
    """Questions, and everything that turns responses to them into verdicts."""

    name: str  # name in reports and metrics
    questions: BenchmarkQuestions  # questions with their items
    grader: Grader  # grades responses
    scorer: EvalScorer  # answers rollout steps that ask which responses are correct
    term_names: Sequence[str]  # reward terms that such steps may name
    media_policy: MediaPolicy  # folders and schemes that media may come from

    def close(self) -> None:
        """End the worker processes of rewards, if there are any."""
        if isinstance(self.scorer, RewardFunctionScorer):
            self.scorer.close()


def question_set_of_benchmark(
    name: str, benchmark: Benchmark, questions: BenchmarkQuestions, media_policy: MediaPolicy
) -> QuestionSet:
    """Return questions that a benchmark's rules grade."""
    grader = RuleGrader(benchmark=benchmark, items=questions.items)
    item_ids = {question.sample.id: question.item.id for question in questions.entries if question.sample}
    return QuestionSet(
        name=name,
        questions=questions,
        grader=grader,
        scorer=RuleScorer(grader=grader, item_ids=item_ids),
        term_names=(CORRECT_TERM,),
        media_policy=media_policy,
    )


def question_set_of_run(
    name: str, config: Config, eval_config: EvalConfig, base_dir: Path, out_dir: Path
) -> QuestionSet:
    """Return a split of a run's own data, named `run:test` for example, which the run's rewards grade.

    Media are read with the library and under the limits of `eval_config`. Relative paths of the config start from
    `base_dir`; generated data go below `out_dir`.

    Raises:
        UserError: the run has no such split, streams it, or a sample of it cannot be used.
    """
    split = name.removeprefix(RUN_DATA_PREFIX)
    if split not in _RUN_DATA_SPLITS:
        known = ", ".join(RUN_DATA_PREFIX + known_split for known_split in _RUN_DATA_SPLITS)
        raise UserError(f"benchmark {name}: a run has {known}")
    if split == "train" and config.data.streaming:
        raise UserError(
            f"benchmark {name}: the run streams data.train (`data.streaming`), and a stream may have no end; write the "
            "questions to measure to a file (docs/evaluation.md has its format), for the benchmark `canonical`"
        )
    data = config.data.model_copy(update={"media_limits": eval_config.media_limits})
    config = config.model_copy(update={"media": eval_config.media, "data": data})
    dataset_context = make_dataset_context(config, base_dir, out_dir / "data")
    sources = config.data.sources_by_split()[split]
    rows: list[Sample | RejectedRow] = []
    for source in sources:
        rows += read_filtered_source(source, base_dir, dataset_context, split)
    samples, rejected = separate_rejected(rows)
    if rejected and config.data.on_bad_sample == "stop":
        raise UserError(f"{len(rejected)} samples cannot be used, {rejected[0].id} for one: {rejected[0].reason}")
    if not samples:
        raise UserError(f"benchmark {name}: the run has no data.{split}")
    # As in the run, rows that cannot be used are left out; `num_unscorable` counts them.
    questions = replace(questions_from_samples(samples), num_unscorable=len(rejected))
    scorer = build_scorer(config, base_dir, PixelReader(dataset_context.media_policy, config.data.media_limits))
    grader = RewardGrader(
        name=name,
        scorer=scorer,
        response_format=build_response_format(eval_config),
        samples={sample.id: sample for sample in samples},
        items=questions.items,
    )
    return QuestionSet(
        name=name,
        questions=questions,
        grader=grader,
        scorer=scorer,
        term_names=tuple(scorer.term_weights),
        media_policy=dataset_context.media_policy,
    )


def hide_media(question_set: QuestionSet, method: str) -> QuestionSet:
    """Return the same questions with every image and video corrupted or left out.

    Raises:
        UserError: media cannot be left out, because the answer is a place in one.
    """
    entries = []
    for question in question_set.questions.entries:
        sample = None if question.sample is None else _hide_sample_media(question.sample, method)
        entries.append(replace(question, sample=sample))
    return replace(question_set, questions=replace(question_set.questions, entries=tuple(entries)))


def _hide_sample_media(sample: Sample, method: str) -> Sample:
    if method == "left_out":
        if sample.target.coordinate_system is not None:
            raise UserError(
                f"corruption=left_out: {sample.id} asks where something is in an image; take corruption=grey"
            )
        return replace(sample, parts=tuple(part for part in sample.parts if isinstance(part, str)))
    corruption = Corruption(method)
    parts = [part if isinstance(part, str) else replace(part, corruption=corruption) for part in sample.parts]
    return replace(sample, parts=tuple(parts))
