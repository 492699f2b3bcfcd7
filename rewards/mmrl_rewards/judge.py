"""Rewards that ask a model: a judge by grades or by duels, and a reward model. Only the answer is shown to them.

They are for answers no rule can check. Ask a judge about what the rules leave open, never instead of them.
"""

from __future__ import annotations

import unicodedata
from math import exp
from statistics import median
from typing import Annotated, TypeVar

from pydantic import Field

from mmrl.types import Kind, Response, Sample, Term, Unscorable
from mmrl_rewards.contract import gold, reward
from mmrl_rewards.services.endpoint import Rejected
from mmrl_rewards.services.judge import JudgeService
from mmrl_rewards.services.scorer import ScorerService

Service = TypeVar("Service")
Scale = Annotated[int, Field(ge=1, le=100)]


@reward(name="judge", kinds=(Kind.TEXT,), service=True)
def pointwise(
    response: Response,
    sample: Sample,
    *,
    judge: JudgeService | None = None,
    scale: Scale = 10,
    rubric: str = "Full marks if it says the same as `reference`, none if it contradicts it or says nothing.",
) -> Term:
    """Median of the judge's grades over `scale`; the judge sees question, target and answer.

    Source: reference-guided single-answer grading (arXiv:2306.05685, 3.1 and 3.4); several votes as in
    self-consistency (arXiv:2203.11171). Departures: an answer that equals the target earns 1, one that cannot be parsed
    or is longer than `judge.max_chars` earns 0, unasked; the verdict is one strict JSON object.

    Raises:
        Unscorable: there is no judge, or it fails; the target is not text.
    """
    service, target = _configured(judge, "judge"), gold(sample, Kind.TEXT)
    if (known := _unasked(response, target, service.max_chars, same=1.0)) is not None:
        return known
    material = {"question": _question(sample), "reference": target, "response": response.answer.value}
    grades = service.grades(material, rubric, scale)
    return Term(median(grades) / scale, f"{service.model} says {', '.join(map(str, grades))} of {scale}")


@reward(name="duel", kinds=(Kind.TEXT,), service=True)
def pairwise(
    response: Response,
    sample: Sample,
    *,
    judge: JudgeService | None = None,
    rubric: str = "Better is what answers the question more rightly, more fully and with fewer words to spare.",
) -> Term:
    """1 if the judge prefers the answer to the target in both orders, 0 if the target, else 0.5; the median of votes.

    Source: pairwise comparison with swapped positions (arXiv:2306.05685, 3.4): a win counts only if it is declared in
    both orders. Departures: an answer that equals the target ties, one that cannot be parsed or is longer than
    `judge.max_chars` loses, unasked.

    Raises:
        Unscorable: as `pointwise`.
    """
    service, target = _configured(judge, "judge"), gold(sample, Kind.TEXT)
    if (known := _unasked(response, target, service.max_chars, same=0.5)) is not None:
        return known
    results = service.duels(_question(sample), response.answer.value, target, rubric)
    return Term(median(results), f"{service.model} says {', '.join(f'{result:g}' for result in results)}")


@reward(name="reward_model", kinds=(Kind.TEXT,), service=True)
def scored(
    response: Response,
    sample: Sample,
    *,
    scorer: ScorerService | None = None,
    max_chars: Annotated[int, Field(ge=1)] = 8000,
) -> Term:
    """sigmoid(s(answer) - s(target)), s the score of a reward model for a reply to the question.

    Source: PAR, preference as reward (arXiv:2502.18770), with the target as its one reference. Departures: an answer
    that equals the target earns 0.5, one that cannot be parsed or is longer than `max_chars` earns 0, unasked.

    Raises:
        Unscorable: there is no reward model, or it fails; the target is not text.
    """
    service, target = _configured(scorer, "scorer"), gold(sample, Kind.TEXT)
    if (known := _unasked(response, target, max_chars, same=0.5)) is not None:
        return known
    question = _question(sample)
    try:
        ours, theirs = (service.score(question, text) for text in (response.answer.value, target))
    except Rejected as error:
        raise Unscorable(f"{service.url} refuses to score: {error}") from error
    return Term(_sigmoid(ours - theirs), f"scores {ours:.3g}, the target {theirs:.3g}")


def _configured(service: Service | None, name: str) -> Service:
    if service is None:
        raise Unscorable(f"no {name} is configured: set args.{name}.url")
    return service


def _unasked(response: Response, target: str, max_chars: int, *, same: float) -> Term | None:
    """What is known without asking."""
    answer = response.answer.value
    if answer is None:
        return Term(0.0, response.answer.problems[0])
    if len(answer) > max_chars:
        return Term(0.0, f"{len(answer)} characters, at most {max_chars} are read")
    return Term(same, "the target itself") if _normal(answer) == _normal(target) else None


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())


def _question(sample: Sample) -> str:
    return "\n".join(part for part in sample.parts if isinstance(part, str))


def _sigmoid(x: float) -> float:
    """1 / (1 + e^-x) without overflow."""
    return 1.0 / (1.0 + exp(-x)) if x >= 0.0 else exp(x) / (1.0 + exp(x))
