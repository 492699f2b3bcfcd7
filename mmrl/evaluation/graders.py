"""From predictions to verdicts: by the rules of a benchmark, or by the rewards that a run was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from mmrl.answer import ResponseFormat
from mmrl.benchmarks.items import Item, missing_ids
from mmrl.benchmarks.predictions import Prediction
from mmrl.benchmarks.registry import Benchmark, grade_response, missing_verdict
from mmrl.benchmarks.report.report import ScoredRun
from mmrl.benchmarks.score_files import score_responses
from mmrl.benchmarks.verdict import ResponseOutcome, Verdict
from mmrl.scoring import RewardFunctionScorer
from mmrl.types import FinishReason, Group, Response, RewardValue, Rollout, Sample, Score
from mmrl.utils.stats import mean_with_interval

CORRECT_TERM: Final = "correct"
"""The name under which a benchmark's verdict serves as a reward term."""


class Grader(Protocol):
    """How responses are marked."""

    def grade(self, predictions: Sequence[Prediction]) -> list[Verdict]:
        """One for each prediction."""

    def grade_run(self, predictions: Sequence[Prediction], generation_settings: Mapping[str, Any]) -> ScoredRun:
        """What a report tells of; items without a prediction count as wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleGrader:
    """The rules of a benchmark, strict and its own."""

    benchmark: Benchmark
    items: Mapping[str, Item]

    def grade(self, predictions: Sequence[Prediction]) -> list[Verdict]:
        """One for each prediction."""
        return [
            grade_response(self.benchmark, _with_image_size(self.items[one.id], one), one.to_item_response())
            for one in predictions
        ]

    def grade_run(self, predictions: Sequence[Prediction], generation_settings: Mapping[str, Any]) -> ScoredRun:
        """Verdicts on all predictions, and on items without one."""
        items = {**self.items, **{one.id: _with_image_size(self.items[one.id], one) for one in predictions}}
        return replace(
            score_responses(self.benchmark, items, [one.to_item_response() for one in predictions], {}),
            generation_settings=generation_settings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardGrader:
    """The rewards of a run, without those that only shape training: `score` is their total, and right is what each of
    them gives 1.
    """

    name: str
    scorer: RewardFunctionScorer
    response_format: ResponseFormat
    samples: Mapping[str, Sample]
    items: Mapping[str, Item]

    def grade(self, predictions: Sequence[Prediction]) -> list[Verdict]:
        """One for each prediction."""
        pairs = [(self._parse_response(one), self.samples[one.id]) for one in predictions]
        scores = self.scorer.score(pairs)
        return [
            self._make_verdict(one, seen, score)
            for one, (seen, _), score in zip(predictions, pairs, scores, strict=True)
        ]

    def grade_run(self, predictions: Sequence[Prediction], generation_settings: Mapping[str, Any]) -> ScoredRun:
        """Verdicts on all predictions, and the mean reward of each task, as training tells it."""
        verdicts = self.grade(predictions)
        responses = [one.to_item_response() for one in predictions]
        absent = missing_ids(self.items, responses)
        rewards: dict[str, list[float]] = {}
        for verdict in verdicts:
            rewards.setdefault(self.samples[verdict.id].task, []).append(verdict.score)
        return ScoredRun(
            benchmark=self.name,
            items=self.items,
            responses=responses,
            verdicts=[*verdicts, *(missing_verdict(self.items[id]) for id in absent)],
            missing_ids=absent,
            provenance={"rewards": {task: mean_with_interval(values).value for task, values in rewards.items()}},
            generation_settings=generation_settings,
        )

    def _parse_response(self, prediction: Prediction) -> Response:
        kind = self.samples[prediction.id].target.answer_type
        if prediction.first_response_chars is None:
            answer = self.response_format.parse(prediction.text, kind)
        else:
            answer = self.response_format.parse_continuation(
                prediction.text[: prediction.first_response_chars],
                prediction.text[prediction.first_response_chars :],
                kind,
            )
        return Response(
            text=prediction.text,
            answer=answer,
            finish_reason=prediction.finish_reason,
            num_tokens=prediction.num_tokens,
            resize_maps=prediction.resize_maps,
            coordinate_system=prediction.coordinate_system,
        )

    def _make_verdict(self, prediction: Prediction, response: Response, score: Score) -> Verdict:
        right = all(term.value >= 1.0 for term in score.terms.values())
        outcome = ResponseOutcome.RIGHT if right else ResponseOutcome.WRONG
        if not right and response.answer.value is None:
            outcome = (
                ResponseOutcome.TRUNCATED
                if prediction.finish_reason is FinishReason.LENGTH
                else ResponseOutcome.NO_ANSWER
            )
        said = response.answer.text or ""
        start = max(0, prediction.text.rfind(said)) if said else 0
        return Verdict(
            id=prediction.id,
            response_index=prediction.response_index,
            cluster=self.items[prediction.id].cluster,
            outcome=outcome,
            rule="reward",
            start=start,
            end=start + len(said),
            value=response.answer.text,
            strict=right,
            official=right,
            score=score.total,
            subsets=self.items[prediction.id].subsets,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleScorer:
    """A benchmark's strict verdict as the reward term `right`, for rollout programs that ask for one."""

    grader: RuleGrader
    item_ids: Mapping[str, str]

    def score_eval(self, rollouts: Sequence[Rollout]) -> tuple[Score, ...]:
        """One score per rollout, in order."""
        predictions = [make_prediction(self.item_ids[rollout.prompt.sample.id], rollout) for rollout in rollouts]
        values = [float(verdict.strict) for verdict in self.grader.grade(predictions)]
        return tuple(Score(terms={CORRECT_TERM: RewardValue(value, "by rule")}, total=value) for value in values)

    def score_groups(
        self,
        rollouts: Sequence[Sequence[Rollout]],
        *,
        step: int,
        probes: Sequence[Mapping[str, Sequence[Rollout]]] = (),
    ) -> tuple[Group, ...]:
        """One group per prompt, in order."""
        return tuple(
            Group(prompt=group[0].prompt, rollouts=tuple(group), scores=self.score_eval(group)) for group in rollouts
        )


def make_prediction(item_id: str, rollout: Rollout, first_response: str | None = None) -> Prediction:
    """What is kept of a rollout, whose `draft` stands before its last trigger."""
    return Prediction(
        id=item_id,
        response_index=rollout.index,
        text=rollout.text,
        finish_reason=rollout.finish_reason,
        num_tokens=rollout.num_tokens,
        first_response_chars=None if first_response is None else len(first_response),
        prompt_digest=rollout.prompt.digest,
        coordinate_system=rollout.prompt.coordinate_system,
        resize_maps=rollout.prompt.resize_maps,
    )


def _with_image_size(item: Item, prediction: Prediction) -> Item:
    """The item with the size of its picture, where the file does not say it."""
    return (
        replace(item, image_size=prediction.resize_maps[0].original)
        if item.image_size is None and prediction.resize_maps
        else item
    )
