"""Rewards from models: a judge that grades, a judge that compares, and a reward model.

Use them for answers that no rule can check, beside rules rather than instead of them: as the `fallback` of one, say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import Discriminator, Field, Tag

from mmrl.answer import COORDINATE_TYPES
from mmrl.types import Response, RewardValue, Sample, Unscorable
from mmrl_rewards import strings
from mmrl_rewards.contract import Of, column_value, part_text, reward, target_value
from mmrl_rewards.services.images import Images, show_question
from mmrl_rewards.services.judge import JudgeService, RewardModelService, sigmoid

ServiceT = TypeVar("ServiceT")
MaxGrade = Annotated[int, Field(ge=1, le=100)]  # highest grade; the lowest is 0
Quantile = Annotated[float, Field(ge=0.0, le=1.0)]
Ensemble = Literal["mean", "minimum"] | Quantile


def _find_form(value: object) -> str:
    return "several" if isinstance(value, list | tuple) else "one"


# Tagged, so that an error is about the form that was written.
OneOrMore = Annotated[
    Annotated[ServiceT, Tag("one")] | Annotated[tuple[ServiceT, ...], Field(min_length=1), Tag("several")],
    Discriminator(_find_form),
]


@reward(name="judge", uses_service=True)
def pointwise(
    response: Response,
    sample: Sample,
    *,
    judge: OneOrMore[JudgeService] | None = None,
    scale: MaxGrade = 10,
    rubric: str = "Full marks if it says the same as `reference`, none if it contradicts it or says nothing.",
    column: str | None = None,
    of: Of = "answer",
    images: Images = False,
    ensemble: Ensemble = "mean",
) -> RewardValue:
    """Return the median of the judge's grades divided by `scale`. The judge sees question, target and answer.

    `of` names what it grades in place of the answer: `thought`, `response` (all of it) or a section. Its reference is
    the text in `sample.meta[column]` in place of the target. With `images` it sees the pictures too: `true`, or the
    most pixels of their longer side. `judge` may be a list: `ensemble` then says which of the judges' values counts,
    their `mean`, `minimum` or a quantile such as 0.25.

    Source: reference-guided single-answer grading (arXiv:2306.05685, 3.1 and 3.4); several votes as in
    self-consistency (arXiv:2203.11171); ensembles by mean and worst case as in arXiv:2310.02743.
    Departures: the judge is not asked about an answer that equals the target, which earns 1, nor about one that cannot
    be read or is longer than `args.judge.max_chars`, which earns 0. The judge replies with one strict JSON object.
    Unscorable: there is no judge, one fails, the target is a coordinate, the column holds no text, or a picture cannot
    be opened.
    """
    judges = _list_services(judge, "no judge is configured: set args.judge.url")
    target = _target_text(sample) if column is None else column_value(sample, column)
    if not isinstance(target, str) or not target.strip():
        raise Unscorable(f"the column {column!r} holds {target!r:.80}, not a text")
    known = _score_without_service(response, target, of, min(service.max_chars for service in judges), if_equal=1.0)
    if isinstance(known, RewardValue):
        return known
    question, urls = show_question(sample, images)
    material = {"question": question, "reference": target, "response": known}

    def ask(service: JudgeService) -> tuple[float, str]:
        grades = service.grade(material, rubric, scale, urls)
        return median(grades) / scale, f"{service.model} says {', '.join(map(str, grades))} of {scale}"

    return _ask_all(judges, ask, ensemble)


@reward(name="duel", uses_service=True)
def pairwise(
    response: Response,
    sample: Sample,
    *,
    judge: OneOrMore[JudgeService] | None = None,
    rubric: str = "Better is what answers the question more rightly, more fully and with fewer words to spare.",
    of: Of = "answer",
    images: Images = False,
    ensemble: Ensemble = "mean",
) -> RewardValue:
    """Return the median of votes that compare the answer with the target.

    A vote is 1 if the judge prefers the answer in both orders, 0 if it prefers the target in both, and else 0.5. `of`,
    `images` and `ensemble` are as in `judge:pointwise`.

    Source: pairwise comparison with swapped positions (arXiv:2306.05685, 3.4): a win counts only if it is declared in
    both orders.
    Departures: the judge is not asked about an answer that equals the target, which earns 0.5, nor about one that
    cannot be read or is longer than `args.judge.max_chars`, which earns 0.
    Unscorable: there is no judge, one fails, the target is a coordinate, or a picture cannot be opened.
    """
    judges = _list_services(judge, "no judge is configured: set args.judge.url")
    target = _target_text(sample)
    known = _score_without_service(response, target, of, min(service.max_chars for service in judges), if_equal=0.5)
    if isinstance(known, RewardValue):
        return known
    question, urls = show_question(sample, images)

    def ask(service: JudgeService) -> tuple[float, str]:
        results = service.compare(question, known, target, rubric, urls)
        return median(results), f"{service.model} says {', '.join(f'{result:g}' for result in results)}"

    return _ask_all(judges, ask, ensemble)


@reward(name="reward_model", uses_service=True)
def scored(
    response: Response,
    sample: Sample,
    *,
    scorer: OneOrMore[RewardModelService] | None = None,
    max_chars: Annotated[int, Field(ge=1)] = 8000,
    of: Of = "answer",
    images: Images = False,
    ensemble: Ensemble = "mean",
) -> RewardValue:
    """Return sigmoid(s(answer) - s(target)), where s is a reward model's score of a reply to the question.

    `of`, `images` and `ensemble` are as in `judge:pointwise`; an ensemble is of values, since scores of different
    models have different scales.

    Source: PAR, preference as reward (arXiv:2502.18770), with the target as its one reference; ensembles by mean and
    worst case as in arXiv:2310.02743.
    Departures: the model is not asked about an answer that equals the target, which earns 0.5, nor about one that
    cannot be read or is longer than `max_chars`, which earns 0.
    Unscorable: there is no reward model, one fails, the target is a coordinate, or a picture cannot be opened.
    """
    scorers = _list_services(scorer, "no scorer is configured: set args.scorer.url")
    target = _target_text(sample)
    known = _score_without_service(response, target, of, max_chars, if_equal=0.5)
    if isinstance(known, RewardValue):
        return known
    question, urls = show_question(sample, images)

    def ask(service: RewardModelService) -> tuple[float, str]:
        score = service.score(question, known, urls)
        target_score = service.score(question, target, urls)
        return sigmoid(score - target_score), f"scores {score:.3g}, the target {target_score:.3g}"

    return _ask_all(scorers, ask, ensemble)


def _list_services(given: ServiceT | tuple[ServiceT, ...] | None, if_none: str) -> tuple[ServiceT, ...]:
    if given is None:
        raise Unscorable(if_none)
    return given if isinstance(given, tuple) else (given,)


def _ask_all(
    services: Sequence[ServiceT], ask: Callable[[ServiceT], tuple[float, str]], ensemble: Ensemble
) -> RewardValue:
    """Return the services' values, combined. If one fails, the reward abstains: without it, the reward would differ."""
    values, reasons = zip(*map(ask, services), strict=True)
    quantile = 0.0 if ensemble == "minimum" else ensemble
    combined = fmean(values) if quantile == "mean" else float(np.quantile(values, quantile))
    return RewardValue(combined, "; ".join(reasons))


def _target_text(sample: Sample) -> str:
    """Return the target as text: JSON, unless it is text. Raises Unscorable for coordinates, which judges misread."""
    answer_type = sample.target.answer_type
    if answer_type in COORDINATE_TYPES:
        raise Unscorable(f"the target is a {answer_type}: a judge reads no coordinates")
    value = target_value(sample, answer_type)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _score_without_service(
    response: Response, target: str, of: str, max_chars: int, *, if_equal: float
) -> RewardValue | str:
    """Return the text to be judged, or the value of one that needs no service.

    An answer that equals the target gets `if_equal`; a text of more than `max_chars` characters gets 0.
    """
    text = part_text(response, of)
    if len(text) > max_chars:
        return RewardValue(0.0, f"{len(text)} characters, at most {max_chars} are read")
    # A judge may err on what needs no judgement.
    equal = of == "answer" and strings.normalize(text) == strings.normalize(target)
    return RewardValue(if_equal, "the target itself") if equal else text
