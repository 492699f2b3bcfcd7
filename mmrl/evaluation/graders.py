"""Grading of predictions: by a benchmark's rules, or by the rewards that a run was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from mmrl.algo.correctness import terms_reach
from mmrl.answer import ResponseFormat
from mmrl.benchmarks.benchmark import Benchmark
from mmrl.benchmarks.grading import grade_response, missing_verdict, score_responses
from mmrl.benchmarks.items import Item, missing_ids
from mmrl.benchmarks.predictions import Prediction
from mmrl.benchmarks.report import ScoredRun
from mmrl.benchmarks.verdict import ResponseOutcome, Verdict
from mmrl.scoring import RewardFunctionScorer
from mmrl.scoring.reward_calls import NOT_FOR_ROLLOUT
from mmrl.scoring.scorer import make_response
from mmrl.types import FinishReason, Response, RewardValue, Rollout, Sample, Score
from mmrl.utils.stats import mean_with_interval

CORRECT_TERM: Final = "correct"
"""Reward term that stands for a benchmark's strict verdict in rollout steps."""
_RESPONSE_FIELDS: Final = tuple(field.name for field in fields(Response) if field.name != "answer")
"""Fields that a `Prediction` keeps of a `Response`, under the same names. The answer is parsed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleGrader:
    """Grades by the strict and official rules of a benchmark."""

    benchmark: Benchmark  # its rules
    items: Mapping[str, Item]  # all items by id

    def grade(self, predictions: Sequence[Prediction]) -> list[Verdict]:
        """Return a verdict on each prediction, in order."""
        verdicts = []
        for prediction in predictions:
            item = _with_image_size(self.items[prediction.id], prediction)
            verdicts.append(grade_response(self.benchmark, item, prediction.to_item_response()))
        return verdicts

    def grade_run(self, predictions: Sequence[Prediction], generation_settings: Mapping[str, Any]) -> ScoredRun:
        """Return verdicts on all predictions and on items without one."""
        items = dict(self.items)
        for prediction in predictions:
            items[prediction.id] = _with_image_size(self.items[prediction.id], prediction)
        responses = list(map(Prediction.to_item_response, predictions))
        run = score_responses(self.benchmark, items, responses, {})
        return replace(run, generation_settings=generation_settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardGrader:
    """Grades by the rewards of a run, without those terms that only shape training.

    A response is correct when every term that its `when` lets judge it gives 1; its score is the total reward.
    """

    name: str  # name of the questions in reports, such as `run:test`
    scorer: RewardFunctionScorer  # rewards of the run
    response_format: ResponseFormat  # finds the answer in a response, as in training
    samples: Mapping[str, Sample]  # samples by id
    items: Mapping[str, Item]  # items by id, which is that of the sample

    def grade(self, predictions: Sequence[Prediction]) -> list[Verdict]:
        """Return a verdict on each prediction, in order."""
        responses = list(map(self._parse_response, predictions))
        samples = [self.samples[prediction.id] for prediction in predictions]
        failures = [prediction.failure for prediction in predictions]
        scores = self.scorer.score(list(zip(responses, samples, strict=True)), failures)
        return list(map(self._make_verdict, predictions, responses, scores))

    def grade_run(self, predictions: Sequence[Prediction], generation_settings: Mapping[str, Any]) -> ScoredRun:
        """Return verdicts on all predictions, and the mean reward of each task as training reports it."""
        verdicts = self.grade(predictions)
        responses = list(map(Prediction.to_item_response, predictions))
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
        answer_type = self.samples[prediction.id].target.answer_type
        if prediction.first_response_chars is None:
            answer = self.response_format.parse(prediction.text, answer_type)
        else:
            first_response = prediction.text[: prediction.first_response_chars]
            continuation = prediction.text[prediction.first_response_chars :]
            answer = self.response_format.parse_continuation(first_response, continuation, answer_type)
        return Response(answer=answer, **{name: getattr(prediction, name) for name in _RESPONSE_FIELDS})

    def _make_verdict(self, prediction: Prediction, response: Response, score: Score) -> Verdict:
        applicable = [name for name, term in score.terms.items() if term is not NOT_FOR_ROLLOUT]
        correct = bool(terms_reach(score.values_by_term, applicable, threshold=1.0))
        answer_text = response.answer.text or ""
        # Rewards do not say where they read the answer, so the verdict quotes its last occurrence.
        start = max(0, prediction.text.rfind(answer_text)) if answer_text else 0
        item = self.items[prediction.id]
        if correct:
            outcome = ResponseOutcome.CORRECT
        elif response.answer.value is not None:
            outcome = ResponseOutcome.INCORRECT
        elif prediction.finish_reason is FinishReason.LENGTH:
            outcome = ResponseOutcome.TRUNCATED
        else:
            outcome = ResponseOutcome.NO_ANSWER
        return Verdict(
            id=prediction.id,
            response_index=prediction.response_index,
            cluster=item.cluster,
            outcome=outcome,
            rule="reward",
            start=start,
            end=start + len(answer_text),
            value=response.answer.text,
            strict=correct,
            official=correct,
            score=score.total,
            subsets=item.subsets,
        )


Grader = RuleGrader | RewardGrader
"""Turns predictions into verdicts: each batch for the progress bar, then all of them for the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleScorer:
    """A benchmark's strict verdict as the reward term `correct`, for rollout steps that need to know it."""

    grader: RuleGrader  # gives the verdicts
    item_ids: Mapping[str, str]  # item id by sample id

    def score_eval(self, rollouts: Sequence[Rollout]) -> tuple[Score, ...]:
        """Return one score per rollout, in order."""
        predictions = [make_prediction(self.item_ids[rollout.prompt.sample.id], rollout) for rollout in rollouts]
        scores = []
        for verdict in self.grader.grade(predictions):
            value = float(verdict.strict)
            scores.append(Score(terms={CORRECT_TERM: RewardValue(value, "by rule")}, total=value))
        return tuple(scores)


def make_prediction(item_id: str, rollout: Rollout, first_response: str | None = None) -> Prediction:
    """Return what predictions.jsonl keeps of a rollout; `first_response` is what `text_before_continuation` returns."""
    response = make_response(rollout)
    return Prediction(
        id=item_id,
        response_index=rollout.index,
        first_response_chars=None if first_response is None else len(first_response),
        prompt_digest=rollout.prompt.digest,
        failure=rollout.failure,
        **{name: getattr(response, name) for name in _RESPONSE_FIELDS},
    )


def _with_image_size(item: Item, prediction: Prediction) -> Item:
    """Return the item with the size of its first image, where the benchmark's file does not say it."""
    if item.image_size is not None or not prediction.resize_maps:
        return item
    return replace(item, image_size=prediction.resize_maps[0].original)
