"""From predictions to verdicts: by the rules of a benchmark, or by the rewards that a run was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from mmrl.answer import Grammar
from mmrl.benchmarks.items import Item, missing
from mmrl.benchmarks.predictions import Prediction
from mmrl.benchmarks.registry import Bench, judge, unanswered
from mmrl.benchmarks.report.report import Run
from mmrl.benchmarks.score_files import scored
from mmrl.benchmarks.verdict import Outcome, Verdict
from mmrl.scoring import Judge
from mmrl.types import Finish, Group, Response, Rollout, Sample, Score, Term
from mmrl.utils.stats import mean

RIGHT: Final = "right"
"""The name under which a benchmark's verdict serves as a reward term."""


class Marking(Protocol):
    """How responses are marked."""

    def verdicts(self, predictions: Sequence[Prediction]) -> list[Verdict]:
        """One for each prediction."""

    def run(self, predictions: Sequence[Prediction], made_with: Mapping[str, Any]) -> Run:
        """What a report tells of; items without a prediction count as wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRule:
    """The rules of a benchmark, strict and its own."""

    bench: Bench
    items: Mapping[str, Item]

    def verdicts(self, predictions: Sequence[Prediction]) -> list[Verdict]:
        """One for each prediction."""
        return [judge(self.bench, _sized(self.items[one.id], one), one.response()) for one in predictions]

    def run(self, predictions: Sequence[Prediction], made_with: Mapping[str, Any]) -> Run:
        """Verdicts on all predictions, and on items without one."""
        items = {**self.items, **{one.id: _sized(self.items[one.id], one) for one in predictions}}
        return replace(scored(self.bench, items, [one.response() for one in predictions], {}), made_with=made_with)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRewards:
    """The rewards of a run, without those that only shape training: `score` is their total, and right is what each of
    them gives 1.
    """

    name: str
    judge: Judge
    grammar: Grammar
    samples: Mapping[str, Sample]
    items: Mapping[str, Item]

    def verdicts(self, predictions: Sequence[Prediction]) -> list[Verdict]:
        """One for each prediction."""
        pairs = [(self._seen(one), self.samples[one.id]) for one in predictions]
        scores = self.judge.rate(pairs)
        return [
            self._verdict(one, seen, score) for one, (seen, _), score in zip(predictions, pairs, scores, strict=True)
        ]

    def run(self, predictions: Sequence[Prediction], made_with: Mapping[str, Any]) -> Run:
        """Verdicts on all predictions, and the mean reward of each task, as training tells it."""
        verdicts = self.verdicts(predictions)
        responses = [one.response() for one in predictions]
        absent = missing(self.items, responses)
        rewards: dict[str, list[float]] = {}
        for verdict in verdicts:
            rewards.setdefault(self.samples[verdict.id].task, []).append(verdict.score)
        return Run(
            bench=self.name,
            items=self.items,
            responses=responses,
            verdicts=[*verdicts, *(unanswered(self.items[id]) for id in absent)],
            missing=absent,
            provenance={"rewards": {task: mean(values).value for task, values in rewards.items()}},
            made_with=made_with,
        )

    def _seen(self, one: Prediction) -> Response:
        kind = self.samples[one.id].target.kind
        if one.draft is None:
            answer = self.grammar.parse(one.text, kind)
        else:
            answer = self.grammar.parse_second(one.text[: one.draft], one.text[one.draft :], kind)
        return Response(
            text=one.text,
            answer=answer,
            finish=one.finish,
            num_tokens=one.tokens,
            resizes=one.resizes,
            frame=one.frame,
        )

    def _verdict(self, one: Prediction, seen: Response, score: Score) -> Verdict:
        right = all(term.value >= 1.0 for term in score.terms.values())
        outcome = Outcome.RIGHT if right else Outcome.WRONG
        if not right and seen.answer.value is None:
            outcome = Outcome.TRUNCATED if one.finish is Finish.LENGTH else Outcome.NO_ANSWER
        said = seen.answer.text or ""
        start = max(0, one.text.rfind(said)) if said else 0
        return Verdict(
            id=one.id,
            sample=one.sample,
            cluster=self.items[one.id].cluster,
            outcome=outcome,
            rule="reward",
            start=start,
            end=start + len(said),
            value=seen.answer.text,
            strict=right,
            compat=right,
            score=score.total,
            groups=self.items[one.id].groups,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleJudge:
    """A benchmark's strict verdict as the reward term `right`, for rollout programs that ask for one."""

    marking: ByRule
    ids: Mapping[str, str]

    def evaluate(self, rollouts: Sequence[Rollout]) -> tuple[Score, ...]:
        """One score per rollout, in order."""
        predictions = [prediction(self.ids[rollout.prompt.sample.id], rollout) for rollout in rollouts]
        values = [float(verdict.strict) for verdict in self.marking.verdicts(predictions)]
        return tuple(Score(terms={RIGHT: Term(value, "by rule")}, total=value) for value in values)

    def judge(
        self,
        rollouts: Sequence[Sequence[Rollout]],
        *,
        step: int,
        probes: Sequence[Mapping[str, Sequence[Rollout]]] = (),
    ) -> tuple[Group, ...]:
        """One group per prompt, in order."""
        return tuple(
            Group(prompt=group[0].prompt, rollouts=tuple(group), scores=self.evaluate(group)) for group in rollouts
        )


def prediction(id: str, rollout: Rollout, draft: str | None = None) -> Prediction:
    """What is kept of a rollout, whose `draft` stands before its last trigger."""
    return Prediction(
        id=id,
        sample=rollout.index,
        text=rollout.text,
        finish=rollout.finish,
        tokens=rollout.num_tokens,
        draft=None if draft is None else len(draft),
        prompt=rollout.prompt.digest,
        frame=rollout.prompt.frame,
        resizes=rollout.prompt.resizes,
    )


def _sized(item: Item, one: Prediction) -> Item:
    """The item with the size of its picture, where the file does not say it."""
    return replace(item, size=one.resizes[0].original) if item.size is None and one.resizes else item
