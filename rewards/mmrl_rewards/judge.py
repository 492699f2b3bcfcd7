"""Rewards from models: a judge that grades, a judge that compares, and a reward model. They see only the answer.

Use them for answers that no rule can check, and beside rules rather than instead of them.
"""

from __future__ import annotations

from math import exp
from statistics import median
from typing import Annotated

from pydantic import Field

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import strings
from mmrl_rewards.contract import answer_value, reward, target_value
from mmrl_rewards.services.endpoint import RequestRejected
from mmrl_rewards.services.judge import JudgeService, RewardModelService

MaxGrade = Annotated[int, Field(ge=1, le=100)]  # highest grade; the lowest is 0


@reward(name="judge", answer_types=(AnswerType.TEXT,), uses_service=True)
def pointwise(
    response: Response,
    sample: Sample,
    *,
    judge: JudgeService | None = None,
    scale: MaxGrade = 10,
    rubric: str = "Full marks if it says the same as `reference`, none if it contradicts it or says nothing.",
) -> RewardValue:
    """Return the median of the judge's grades divided by `scale`. The judge sees question, target and answer.

    Source: reference-guided single-answer grading (arXiv:2306.05685, 3.1 and 3.4); several votes as in
    self-consistency (arXiv:2203.11171).
    Departures: the judge is not asked about an answer that equals the target, which earns 1, nor about one that cannot
    be parsed or is longer than `args.judge.max_chars`, which earns 0. The judge replies with one strict JSON object.
    Unscorable: there is no judge, it fails, or the target is not text.
    """
    if judge is None:
        raise Unscorable("no judge is configured: set args.judge.url")
    target = target_value(sample, AnswerType.TEXT)
    known = _score_without_service(response, target, judge.max_chars, if_equal=1.0)
    if known is not None:
        return known
    material = {"question": _question_text(sample), "reference": target, "response": response.answer.value}
    grades = judge.grade(material, rubric, scale)
    return RewardValue(median(grades) / scale, f"{judge.model} says {', '.join(map(str, grades))} of {scale}")


@reward(name="duel", answer_types=(AnswerType.TEXT,), uses_service=True)
def pairwise(
    response: Response,
    sample: Sample,
    *,
    judge: JudgeService | None = None,
    rubric: str = "Better is what answers the question more rightly, more fully and with fewer words to spare.",
) -> RewardValue:
    """Return the median of votes that compare the answer with the target.

    A vote is 1 if the judge prefers the answer in both orders, 0 if it prefers the target in both, and else 0.5.

    Source: pairwise comparison with swapped positions (arXiv:2306.05685, 3.4): a win counts only if it is declared in
    both orders.
    Departures: the judge is not asked about an answer that equals the target, which earns 0.5, nor about one that
    cannot be parsed or is longer than `args.judge.max_chars`, which earns 0.
    Unscorable: there is no judge, it fails, or the target is not text.
    """
    if judge is None:
        raise Unscorable("no judge is configured: set args.judge.url")
    target = target_value(sample, AnswerType.TEXT)
    known = _score_without_service(response, target, judge.max_chars, if_equal=0.5)
    if known is not None:
        return known
    results = judge.compare(_question_text(sample), response.answer.value, target, rubric)
    return RewardValue(median(results), f"{judge.model} says {', '.join(f'{result:g}' for result in results)}")


@reward(name="reward_model", answer_types=(AnswerType.TEXT,), uses_service=True)
def scored(
    response: Response,
    sample: Sample,
    *,
    scorer: RewardModelService | None = None,
    max_chars: Annotated[int, Field(ge=1)] = 8000,
) -> RewardValue:
    """Return sigmoid(s(answer) - s(target)), where s is a reward model's score of a reply to the question.

    Source: PAR, preference as reward (arXiv:2502.18770), with the target as its one reference.
    Departures: the model is not asked about an answer that equals the target, which earns 0.5, nor about one that
    cannot be parsed or is longer than `max_chars`, which earns 0.
    Unscorable: there is no reward model, it fails, or the target is not text.
    """
    if scorer is None:
        raise Unscorable("no scorer is configured: set args.scorer.url")
    target = target_value(sample, AnswerType.TEXT)
    known = _score_without_service(response, target, max_chars, if_equal=0.5)
    if known is not None:
        return known
    question = _question_text(sample)
    try:
        answer_score = scorer.score(question, response.answer.value)
        target_score = scorer.score(question, target)
    except RequestRejected as error:
        raise Unscorable(f"{scorer.url} refuses to score: {error}") from error
    reason = f"scores {answer_score:.3g}, the target {target_score:.3g}"
    gap = answer_score - target_score
    # 1 / (1 + e^-gap), written so that neither sign overflows.
    value = 1.0 / (1.0 + exp(-gap)) if gap >= 0.0 else exp(gap) / (1.0 + exp(gap))
    return RewardValue(value, reason)


def _score_without_service(response: Response, target: str, max_chars: int, *, if_equal: float) -> RewardValue | None:
    """Return the value of an answer that needs no service, or None for one that does.

    An answer that equals the target gets `if_equal`; one of more than `max_chars` characters gets 0.
    """
    answer = answer_value(response)
    if len(answer) > max_chars:
        return RewardValue(0.0, f"{len(answer)} characters, at most {max_chars} are read")
    # A judge may err on what needs no judgement.
    equal = strings.normalize(answer) == strings.normalize(target)
    return RewardValue(if_equal, "the target itself") if equal else None


def _question_text(sample: Sample) -> str:
    """Return the text parts of the prompt, one per line."""
    return "\n".join(part for part in sample.parts if isinstance(part, str))
