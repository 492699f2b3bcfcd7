"""MEGA-Bench's credit for an answer: a metric for each of its fields, and how they are put together.

Source: megabench/evaluation_processor.py of github.com/TIGER-AI-Lab/MEGA-Bench (arXiv:2410.10563). Departures: the
answer is what the rules of this room find, instead of each task's own prefix; those of the metrics
(`megabench_metrics`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from statistics import fmean
from typing import Any

from mmrl.benchmarks.extraction.extract import Found
from mmrl.benchmarks.extraction.text import answering
from mmrl.benchmarks.items import Item, Response
from mmrl.benchmarks.official.megabench_metrics import CONTEXTUAL, FAITHFUL, METRICS, OF_FORMULAS, OF_LINES
from mmrl.benchmarks.official.megabench_values import LONGEST, fields_of
from mmrl.types import UserError


def megabench(item: Item, response: Response, found: Found) -> float:
    """The credit of an answer: of its fields' metrics, in `meta.metric`, the mean or the least, as `meta.aggregation`
    says. One metric alone is that of an answer without fields.

    Raises:
        UserError: a metric is none of those here.
    """
    metrics = _metrics(item)
    for name in metrics.values():
        if name not in METRICS:
            raise UserError(
                f"item {item.id!r}: the metric {name!r} cannot be scored by rule; those that can: {', '.join(METRICS)}"
            )
    said = _said(item, response, found)
    scores = {field: METRICS[name](said[field], _due(item, field, name)) for field, name in metrics.items()}
    return _aggregated(scores, item.extra.get("aggregation") or {})


def full_credit(item: Item, response: Response, found: Found, field: str) -> bool:
    """Whether a field is right by its metric, of those whose full credit a careful reader would give too."""
    name = _metrics(item).get(field, "")
    return name in FAITHFUL and METRICS[name](_said(item, response, found)[field], _due(item, field, name)) == 1.0


def macro(judged: Sequence[tuple[Item, Response, Found]]) -> float:
    """MEGA-Bench's number: the mean over tasks of each task's mean credit."""
    tasks: dict[str, list[float]] = {}
    for item, response, found in judged:
        tasks.setdefault(str(item.extra.get("task")), []).append(megabench(item, response, found))
    return fmean(map(fmean, tasks.values())) if tasks else 0.0


def _said(item: Item, response: Response, found: Found) -> Mapping[str, Any]:
    """What a response says for each field."""
    metrics = _metrics(item)
    return fields_of(_answered(item, response, found, {*metrics.values()})[-LONGEST:], [*metrics])


def _answered(item: Item, response: Response, found: Found, metrics: Set[str]) -> str:
    """All that answers, where there are several fields; of one field what was found, with the lines that follow where
    several are due, and the dollar signs around it where they tell formulas from words.
    """
    part = answering(response.text)
    if part is None or not found.value:
        return ""
    if len(_metrics(item)) > 1:
        return response.text[part.start : part.end]
    start, end = found.start, found.end
    if found.rule == "announced_text" and (metrics & OF_LINES or "\n" in str(item.answer)):
        return response.text[start : part.end].strip()
    if metrics & OF_FORMULAS:
        return response.text[start - (response.text[:start][-1:] == "$") : end + (response.text[end : end + 1] == "$")]
    return found.value[:LONGEST]


def _metrics(item: Item) -> Mapping[str, str]:
    """The metric of each field; that of an answer without fields is called by no name."""
    named = item.extra.get("metric")
    return {field: str(name) for field, name in (named if isinstance(named, Mapping) else {"": named}).items()}


def _due(item: Item, field: str, metric: str) -> Any:  # noqa: ANN401 - whatever a table holds
    context = item.extra.get("context")
    if metric in CONTEXTUAL and context:
        return context
    return item.answer[field] if isinstance(item.answer, Mapping) else item.answer


def _aggregated(scores: Mapping[str, float], how: Mapping[str, Any]) -> float:
    if how.get("function") == "min":
        return min(scores.values())
    weights = how.get("field_weights") or {}
    given = {field: float(weights.get(field, 1.0)) for field in scores}
    total = sum(given.values())
    return sum(scores[field] * weight for field, weight in given.items()) / total if total else 0.0
