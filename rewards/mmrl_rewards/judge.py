"""Rewards that ask a model: a judge by grades or by duels, and a reward model. Only the answer is shown to them.

They are for answers no rule can check. Ask a judge about what the rules leave open, never instead of them.
"""

from __future__ import annotations

import unicodedata
from math import exp
from statistics import median
from typing import Annotated, TypeVar

from pydantic import Field

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import reward, target_value
from mmrl_rewards.services.endpoint import RequestRejected
from mmrl_rewards.services.judge import JudgeService
from mmrl_rewards.services.scorer import RewardModelService

ServiceT = TypeVar("ServiceT")
MaxGrade = Annotated[int, Field(ge=1, le=100)]


@reward(name="judge", answer_types=(AnswerType.TEXT,), uses_service=True)
def pointwise(
    response: Response,
    sample: Sample,
    *,
    judge: JudgeService | None = None,
    scale: MaxGrade = 10,
    rubric: str = "Full marks if it says the same as `reference`, none if it contradicts it or says nothing.",
) -> RewardValue:
    """Median of the judge's grades over `scale`; the judge sees question, target and answer.

    Source: reference-guided single-answer grading (arXiv:2306.05685, 3.1 and 3.4); several votes as in
    self-consistency (arXiv:2203.11171). Departures: an answer that equals the target earns 1, one that cannot be parsed
    or is longer than `judge.max_chars` earns 0, unasked; the verdict is one strict JSON object.

    Raises:
        Unscorable: there is no judge, or it fails; the target is not text.
    """
    service, target = _require_service(judge, "judge"), target_value(sample, AnswerType.TEXT)
    if (known := _score_without_service(response, target, service.max_chars, if_equal=1.0)) is not None:
        return known
    material = {"question": _question_text(sample), "reference": target, "response": response.answer.value}
    grades = service.grade(material, rubric, scale)
    return RewardValue(median(grades) / scale, f"{service.model} says {', '.join(map(str, grades))} of {scale}")


@reward(name="duel", answer_types=(AnswerType.TEXT,), uses_service=True)
def pairwise(
    response: Response,
    sample: Sample,
    *,
    judge: JudgeService | None = None,
    rubric: str = "Better is what answers the question more rightly, more fully and with fewer words to spare.",
) -> RewardValue:
    """1 if the judge prefers the answer to the target in both orders, 0 if the target, else 0.5; the median of votes.

    Source: pairwise comparison with swapped positions (arXiv:2306.05685, 3.4): a win counts only if it is declared in
    both orders. Departures: an answer that equals the target ties, one that cannot be parsed or is longer than
    `judge.max_chars` loses, unasked.

    Raises:
        Unscorable: as `pointwise`.
    """
    service, target = _require_service(judge, "judge"), target_value(sample, AnswerType.TEXT)
    if (known := _score_without_service(response, target, service.max_chars, if_equal=0.5)) is not None:
        return known
    results = service.compare(_question_text(sample), response.answer.value, target, rubric)
    return RewardValue(median(results), f"{service.model} says {', '.join(f'{result:g}' for result in results)}")


@reward(name="reward_model", answer_types=(AnswerType.TEXT,), uses_service=True)
def scored(
    response: Response,
    sample: Sample,
    *,
    scorer: RewardModelService | None = None,
    max_chars: Annotated[int, Field(ge=1)] = 8000,
) -> RewardValue:
    """sigmoid(s(answer) - s(target)), s the score of a reward model for a reply to the question.

    Source: PAR, preference as reward (arXiv:2502.18770), with the target as its one reference. Departures: an answer
    that equals the target earns 0.5, one that cannot be parsed or is longer than `max_chars` earns 0, unasked.

    Raises:
        Unscorable: there is no reward model, or it fails; the target is not text.
    """
    service, target = _require_service(scorer, "scorer"), target_value(sample, AnswerType.TEXT)
    if (known := _score_without_service(response, target, max_chars, if_equal=0.5)) is not None:
        return known
    question = _question_text(sample)
    try:
        ours, theirs = (service.score(question, text) for text in (response.answer.value, target))
    except RequestRejected as error:
        raise Unscorable(f"{service.url} refuses to score: {error}") from error
    return RewardValue(_sigmoid(ours - theirs), f"scores {ours:.3g}, the target {theirs:.3g}")


def _require_service(service: ServiceT | None, name: str) -> ServiceT:
    if service is None:
        raise Unscorable(f"no {name} is configured: set args.{name}.url")
    return service


def _score_without_service(response: Response, target: str, max_chars: int, *, if_equal: float) -> RewardValue | None:
    """Return the value that is known without asking the service, or None."""
    answer = response.answer.value
    if answer is None:
        return RewardValue(0.0, response.answer.problems[0])
    if len(answer) > max_chars:
        return RewardValue(0.0, f"{len(answer)} characters, at most {max_chars} are read")
    return RewardValue(if_equal, "the target itself") if _normalize(answer) == _normalize(target) else None


def _normalize(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())


def _question_text(sample: Sample) -> str:
    return "\n".join(part for part in sample.parts if isinstance(part, str))


def _sigmoid(x: float) -> float:
    """1 / (1 + e^-x) without overflow."""
    return 1.0 / (1.0 + exp(-x)) if x >= 0.0 else exp(x) / (1.0 + exp(x))
