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

from mmrl.algo.seeds import derive
from mmrl.benchmarks.predictions import Prediction, append, take_up
from mmrl.benchmarks.readers.questions import Questions
from mmrl.config import Exam
from mmrl.distributed.ranks import Ranks, share
from mmrl.evaluation.graders import Marking, prediction
from mmrl.evaluation.model_under_test import differences
from mmrl.evaluation.questions import Asked
from mmrl.log.console import Console
from mmrl.policy.processor import QwenProcessor
from mmrl.ports import Program
from mmrl.rollout.build import Kit, check, compose
from mmrl.rollout.factory import Samplers, law_of
from mmrl.rollout.tools.replies import Workshop
from mmrl.types import Finish, Sample, UserError
from mmrl.utils.files import refusing, write_atomically

_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class Desk:
    """The folder of an evaluation."""

    path: Path

    @property
    def settings(self) -> Path:
        """What the evaluation is of."""
        return self.path / "settings.json"

    @property
    def predictions(self) -> Path:
        """The responses."""
        return self.path / "predictions.jsonl"

    @property
    def report(self) -> Path:
        """What they come to; written last, so an evaluation that has it is finished."""
        return self.path / "report.json"

    def claim(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """Make the folder this evaluation's; returns what an earlier start wrote, None where this is the first.

        Raises:
            UserError: it holds another one, or something else.
        """
        with refusing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        if not self.settings.exists():
            if self.predictions.exists() or self.report.exists():
                raise UserError(f"{self.path} holds results of another command; choose another --out")
            return None
        try:
            before: dict[str, Any] = json.loads(self.settings.read_text(encoding="utf-8"))
            known = before["settings"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.settings}: cannot be read ({error}); choose another --out") from error
        if changed := differences(known, json.loads(json.dumps(settings))):
            lines = "\n".join(f"  {line}" for line in changed)
            raise UserError(
                f"{self.path} holds another evaluation; these differ (there -> here):\n{lines}\n"
                "set them back, or choose another --out"
            )
        return before

    def own(self, settings: Mapping[str, Any], missing: Mapping[str, str]) -> None:
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
            self.begin(settings, missing)

    def begin(self, settings: Mapping[str, Any], missing: Mapping[str, str]) -> None:
        """Write down what the evaluation is of, and the items that cannot be asked, with the reason."""
        text = json.dumps({"settings": settings, "missing": missing}, indent=1, ensure_ascii=False)
        write_atomically(self.settings, text + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """What is asked, in batches of `batch` questions and `samples` responses to each."""

    samples: Sequence[tuple[str, Sample]]
    batch: int
    repeats: int

    @property
    def batches(self) -> list[Sequence[tuple[str, Sample]]]:
        """The samples of each batch, with the ids of their items."""
        return [self.samples[start : start + self.batch] for start in range(0, len(self.samples), self.batch)]

    def answered(self, desk: Desk) -> list[Prediction]:
        """What was answered before, up to the last whole batch; what is torn is dropped."""
        return take_up(desk.predictions, [len(batch) * self.repeats for batch in self.batches])

    def is_complete(self, predictions: Sequence[Prediction]) -> bool:
        """Whether all is answered."""
        return len(predictions) == len(self.samples) * self.repeats


def paper_of(questions: Questions, missing: Mapping[str, str], *, batch: int, repeats: int) -> Paper:
    """The questions that can be asked."""
    asked = [(each.item.id, each.sample) for each in questions.asked if each.sample and each.item.id not in missing]
    return Paper(samples=asked, batch=batch, repeats=repeats)


def unaskable(questions: Questions, measure: Callable[[Sample], object]) -> dict[str, str]:
    """Why questions cannot be asked, by the item's id: `measure` refuses them, or their media cannot be had."""
    problems = questions.problems
    for question in questions.asked:
        if question.sample is not None:
            try:
                measure(question.sample)
            except UserError as error:
                problems[question.item.id] = str(error)
    return {id: problems[id] for id in questions.items if id in problems}


def refuse_missing(
    missing: Mapping[str, str], questions: Questions, *, allowed: bool, remedy: str, warn: Callable[[str], None]
) -> None:
    """Name the questions that cannot be asked; `remedy` is the setting that allows them. Rows left out are told of.

    Raises:
        UserError: there are some, and they are not allowed to count as wrong.
    """
    of = len(questions.asked)
    if questions.left_out:
        warn(f"{questions.left_out} of {of + questions.left_out} rows are left out: no rule scores them")
    if not missing:
        return
    lines = [f"  {id}: {reason}" for id, reason in [*missing.items()][:_NAMED]]
    lines += [f"  and {len(missing) - _NAMED} more"] if len(missing) > _NAMED else []
    head = f"{len(missing)} of {of} questions cannot be asked"
    if not allowed or len(missing) == of:
        raise UserError("\n".join([f"{head}:", *lines, f"repair them, or count them as wrong with {remedy}"]))
    warn("\n".join([f"{head} and count as wrong:", *lines]))


def program_of(
    exam: Exam,
    asked: Asked,
    *,
    samplers: Samplers,
    processor: QwenProcessor,
    banned: tuple[int, ...],
    workshop: Workshop,
) -> Program:
    """What is done with a question, by the settings of an exam.

    Raises:
        UserError: the program cannot run.
    """
    steps, law, seed = exam.evaluation.program, law_of(exam, banned, processor.grammar.stop), exam.run.seed
    check(steps, processor, banned, asked.terms, workshop.find_tool)
    kit = Kit(
        sampler=samplers.sampler(seed, "evaluation"),
        judge=asked.judge,
        processor=processor,
        law=law,
        group_size=exam.samples,
        groups=exam.evaluation.batch_size,
        seed=derive(seed, "evaluation"),
        workshop=workshop,
    )
    return compose(steps, kit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What answers, and what is told of it meanwhile."""

    name: str
    desk: Desk
    processor: QwenProcessor
    program: Program
    marking: Marking
    console: Console
    ranks: Ranks


def sit(paper: Paper, answered: Sequence[Prediction], room: Room) -> list[Prediction]:
    """Answer what is left; returns all predictions.

    Raises:
        UserError: a question cannot be asked after all, or the disk is full.
    """
    predictions, right = [*answered], sum(verdict.strict for verdict in room.marking.verdicts(answered))
    left = len(predictions)
    done = next(k for k, rows in enumerate(_sums(paper)) if rows == left)
    room.console.start_stage(room.name, len(paper.batches), done)
    for number, batch in enumerate(paper.batches[done:], done + 1):
        fresh = _answers(batch, room)
        room.ranks.once(partial(append, room.desk.predictions, fresh))
        predictions += fresh
        right += sum(verdict.strict for verdict in room.marking.verdicts(fresh))
        cut = sum(one.finish is Finish.LENGTH for one in predictions)
        metrics = {
            "accuracy": right / len(predictions),
            "rollout/truncated_frac": cut / len(predictions),
            "rollout/tokens_mean": sum(one.tokens for one in predictions) / len(predictions),
        }
        room.console.step(number, metrics, {})
    room.console.end_stage()
    return predictions


def _sums(paper: Paper) -> Iterator[int]:
    """Rows after no batch, one, two, ..."""
    rows = 0
    yield rows
    for batch in paper.batches:
        rows += len(batch) * paper.repeats
        yield rows


def _answers(batch: Sequence[tuple[str, Sample]], room: Room) -> list[Prediction]:
    """The answers to a batch, of which every rank gives its share."""
    shares = room.ranks.gather(_answered(batch[share(len(batch), room.ranks)], room))
    return [prediction for own in shares for prediction in own]


def _answered(batch: Sequence[tuple[str, Sample]], room: Room) -> list[Prediction]:
    if not batch:
        return []
    answers = room.program.answer([room.processor.ask(sample) for _, sample in batch], step=0)
    return [
        prediction(id, rollout, room.processor.draft_of(rollout))
        for (id, _), group in zip(batch, answers.groups, strict=True)
        for rollout in group
    ]
