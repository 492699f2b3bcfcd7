"""The exam itself: ask, answer, write down, go on after a kill.

Everything lies in one folder:

settings.json        what the evaluation is of; another one in the same folder is refused
predictions.jsonl    responses, appended batch by batch
verdicts.jsonl, report.json, report.md      made of the predictions alone, so they can be made again
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from mmrl.algo.seeds import derive_seed
from mmrl.benchmarks.predictions import Prediction, append_predictions, read_complete_batches
from mmrl.benchmarks.readers.questions import BenchmarkQuestions
from mmrl.config import EvalConfig
from mmrl.distributed.ranks import Ranks, rank_slice
from mmrl.evaluation.graders import Grader, make_prediction
from mmrl.evaluation.model_under_test import describe_differences
from mmrl.evaluation.questions import QuestionSet
from mmrl.log.console import Console
from mmrl.policy.processor import QwenProcessor
from mmrl.ports import RolloutPipeline
from mmrl.rollout.factory import SamplerFactory, build_sampling_params
from mmrl.rollout.pipeline import build_pipeline, check_steps
from mmrl.rollout.steps.base import RolloutContext
from mmrl.rollout.tools.executor import ToolRunner
from mmrl.types import FinishReason, Sample, UserError
from mmrl.utils.files import report_write_errors, write_atomically

_MAX_LISTED: Final = 5


@dataclass(frozen=True, slots=True)
class EvalDir:
    """The folder of an evaluation."""

    path: Path

    @property
    def settings_file(self) -> Path:
        """What the evaluation is of."""
        return self.path / "settings.json"

    @property
    def predictions_file(self) -> Path:
        """The responses."""
        return self.path / "predictions.jsonl"

    @property
    def report_file(self) -> Path:
        """What they come to; written last, so an evaluation that has it is finished."""
        return self.path / "report.json"

    def claim(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """Make the folder this evaluation's; returns what an earlier start wrote, None where this is the first.

        Raises:
            UserError: it holds another one, or something else.
        """
        with report_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        if not self.settings_file.exists():
            if self.predictions_file.exists() or self.report_file.exists():
                raise UserError(f"{self.path} holds results of another command; choose another --out")
            return None
        try:
            before: dict[str, Any] = json.loads(self.settings_file.read_text(encoding="utf-8"))
            known = before["settings"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.settings_file}: cannot be read ({error}); choose another --out") from error
        if changed := describe_differences(known, json.loads(json.dumps(settings))):
            lines = "\n".join(f"  {line}" for line in changed)
            raise UserError(
                f"{self.path} holds another evaluation; these differ (there -> here):\n{lines}\n"
                "set them back, or choose another --out"
            )
        return before

    def claim_or_reset(self, settings: Mapping[str, Any], missing: Mapping[str, str]) -> None:
        """Make the folder this evaluation's; what another one left there, as a run on another path did, goes.

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            known = self.claim(settings)
        except UserError:
            shutil.rmtree(self.path, ignore_errors=True)
            known = self.claim(settings)
        if known is None:
            self.write_settings(settings, missing)

    def write_settings(self, settings: Mapping[str, Any], missing: Mapping[str, str]) -> None:
        """Write down what the evaluation is of, and the items that cannot be asked, with the reason."""
        text = json.dumps({"settings": settings, "missing": missing}, indent=1, ensure_ascii=False)
        write_atomically(self.settings_file, text + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalBatches:
    """What is asked, in batches of `batch` questions and `samples` responses to each."""

    questions: Sequence[tuple[str, Sample]]
    batch_size: int
    responses_per_question: int

    @property
    def batches(self) -> list[Sequence[tuple[str, Sample]]]:
        """The samples of each batch, with the ids of their items."""
        return [
            self.questions[start : start + self.batch_size] for start in range(0, len(self.questions), self.batch_size)
        ]

    def read_predictions(self, eval_dir: EvalDir) -> list[Prediction]:
        """What was answered before, up to the last whole batch; what is torn is dropped."""
        return read_complete_batches(
            eval_dir.predictions_file, [len(batch) * self.responses_per_question for batch in self.batches]
        )

    def is_complete(self, predictions: Sequence[Prediction]) -> bool:
        """Whether all is answered."""
        return len(predictions) == len(self.questions) * self.responses_per_question


def make_batches(
    questions: BenchmarkQuestions, missing: Mapping[str, str], *, batch_size: int, responses_per_question: int
) -> EvalBatches:
    """The questions that can be asked."""
    asked = [(each.item.id, each.sample) for each in questions.entries if each.sample and each.item.id not in missing]
    return EvalBatches(questions=asked, batch_size=batch_size, responses_per_question=responses_per_question)


def find_unusable_questions(questions: BenchmarkQuestions, measure: Callable[[Sample], object]) -> dict[str, str]:
    """Why questions cannot be asked, by the item's id: `measure` refuses them, or their media cannot be had."""
    problems = questions.problems
    for question in questions.entries:
        if question.sample is not None:
            try:
                measure(question.sample)
            except UserError as error:
                problems[question.item.id] = str(error)
    return {id: problems[id] for id in questions.items if id in problems}


def check_missing(
    missing: Mapping[str, str],
    questions: BenchmarkQuestions,
    *,
    allowed: bool,
    remedy: str,
    warn: Callable[[str], None],
) -> None:
    """Name the questions that cannot be asked; `remedy` is the setting that allows them. Rows left out are told of.

    Raises:
        UserError: there are some, and they are not allowed to count as wrong.
    """
    of = len(questions.entries)
    if questions.num_unscorable:
        warn(f"{questions.num_unscorable} of {of + questions.num_unscorable} rows are left out: no rule scores them")
    if not missing:
        return
    lines = [f"  {id}: {reason}" for id, reason in [*missing.items()][:_MAX_LISTED]]
    lines += [f"  and {len(missing) - _MAX_LISTED} more"] if len(missing) > _MAX_LISTED else []
    head = f"{len(missing)} of {of} questions cannot be asked"
    if not allowed or len(missing) == of:
        raise UserError("\n".join([f"{head}:", *lines, f"repair them, or count them as wrong with {remedy}"]))
    warn("\n".join([f"{head} and count as wrong:", *lines]))


def build_eval_pipeline(
    eval_config: EvalConfig,
    question_set: QuestionSet,
    *,
    samplers: SamplerFactory,
    processor: QwenProcessor,
    banned_token_ids: tuple[int, ...],
    tool_runner: ToolRunner,
) -> RolloutPipeline:
    """What is done with a question, by the settings of an exam.

    Raises:
        UserError: the program cannot run.
    """
    steps, law, seed = (
        eval_config.evaluation.rollout_steps,
        build_sampling_params(eval_config, banned_token_ids, processor.grammar.all_stop_strings),
        eval_config.run.seed,
    )
    check_steps(
        steps, processor, banned_token_ids, question_set.term_names, tool_runner.load_tool, base_dir=samplers.base_dir
    )
    kit = RolloutContext(
        sampler=samplers.make_sampler(seed, "evaluation"),
        scorer=question_set.scorer,
        processor=processor,
        sampling_params=law,
        group_size=eval_config.responses_per_question,
        groups_per_step=eval_config.evaluation.batch_size,
        seed=derive_seed(seed, "evaluation"),
        tool_runner=tool_runner,
        base_dir=samplers.base_dir,
    )
    return build_pipeline(steps, kit)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSession:
    """What answers, and what is told of it meanwhile."""

    name: str
    eval_dir: EvalDir
    processor: QwenProcessor
    pipeline: RolloutPipeline
    grader: Grader
    console: Console
    ranks: Ranks


def run_session(batches: EvalBatches, earlier: Sequence[Prediction], session: EvalSession) -> list[Prediction]:
    """Answer what is left; returns all predictions.

    Raises:
        UserError: a question cannot be asked after all, or the disk is full.
    """
    predictions, right = [*earlier], sum(verdict.strict for verdict in session.grader.grade(earlier))
    left = len(predictions)
    done = next(k for k, rows in enumerate(_cumulative_rows(batches)) if rows == left)
    session.console.start_stage(session.name, len(batches.batches), done)
    for number, batch in enumerate(batches.batches[done:], done + 1):
        fresh = _answer_batch(batch, session)
        session.ranks.on_rank0(partial(append_predictions, session.eval_dir.predictions_file, fresh))
        predictions += fresh
        right += sum(verdict.strict for verdict in session.grader.grade(fresh))
        cut = sum(one.finish_reason is FinishReason.LENGTH for one in predictions)
        metrics = {
            "accuracy": right / len(predictions),
            "rollout/truncated_frac": cut / len(predictions),
            "rollout/response_tokens_mean": sum(one.num_tokens for one in predictions) / len(predictions),
        }
        session.console.show_step(number, metrics, {})
    session.console.end_stage()
    return predictions


def _cumulative_rows(batches: EvalBatches) -> Iterator[int]:
    """Rows after no batch, one, two, ..."""
    rows = 0
    yield rows
    for batch in batches.batches:
        rows += len(batch) * batches.responses_per_question
        yield rows


def _answer_batch(batch: Sequence[tuple[str, Sample]], session: EvalSession) -> list[Prediction]:
    """The answers to a batch, of which every rank gives its share."""
    shares = session.ranks.all_gather(_answer_share(batch[rank_slice(len(batch), session.ranks)], session))
    return [prediction for own in shares for prediction in own]


def _answer_share(batch: Sequence[tuple[str, Sample]], session: EvalSession) -> list[Prediction]:
    if not batch:
        return []
    answers = session.pipeline.run([session.processor.build(sample) for _, sample in batch], step=0)
    return [
        make_prediction(id, rollout, session.processor.first_response_text(rollout))
        for (id, _), group in zip(batch, answers.groups, strict=True)
        for rollout in group
    ]
