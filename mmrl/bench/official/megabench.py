"""MEGA-Bench's credit for an answer: a metric for each of its fields, and how they are put together.

Source: megabench/evaluation_processor.py of github.com/TIGER-AI-Lab/MEGA-Bench (arXiv:2410.10563). Departures: the
answer is what the rules of this room find, instead of each task's own prefix; those of the metrics
(`megabench_metrics`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from mmrl.bench.extract import Found
from mmrl.bench.items import Item, Response
from mmrl.bench.official.megabench_metrics import CONTEXTUAL, LONGEST, METRICS, fields_of
from mmrl.bench.text import answering
from mmrl.types import UserError


def megabench(item: Item, response: Response, found: Found) -> float:
    """The credit of an answer: of its fields' metrics, in `meta.metric`, the mean or the least, as `meta.aggregation`
    says. One metric alone is that of an answer without fields.

    Raises:
        UserError: a metric is none of those here.
    """
    named = item.extra.get("metric")
    metrics = {field: str(name) for field, name in (named if isinstance(named, Mapping) else {"": named}).items()}
    for name in metrics.values():
        if name not in METRICS:
            raise UserError(
                f"item {item.id!r}: the metric {name!r} cannot be scored by rule; those that can: {', '.join(METRICS)}"
            )
    due = item.answer if isinstance(item.answer, Mapping) else dict.fromkeys(metrics, item.answer)
    said = fields_of(_answering(response, found) if len(metrics) > 1 else (found.value or "")[:LONGEST], [*metrics])
    context = item.extra.get("context") or {}
    scores = {
        field: METRICS[name](said.get(field, ""), context if name in CONTEXTUAL and context else due[field])
        for field, name in metrics.items()
    }
    return _aggregated(scores, item.extra.get("aggregation") or {})


def macro(judged: Sequence[tuple[Item, Response, Found]]) -> float:
    """MEGA-Bench's number: the mean over tasks of each task's mean credit."""
    tasks: dict[str, list[float]] = {}
    for item, response, found in judged:
        tasks.setdefault(str(item.extra.get("task")), []).append(megabench(item, response, found))
    return fmean(map(fmean, tasks.values())) if tasks else 0.0


def _answering(response: Response, found: Found) -> str:
    part = answering(response.text)
    return response.text[part.start : part.end][-LONGEST:] if part and found.value else ""


def _aggregated(scores: Mapping[str, float], how: Mapping[str, Any]) -> float:
    if how.get("function") == "min":
        return min(scores.values())
    weights = how.get("field_weights") or {}
    given = {field: float(weights.get(field, 1.0)) for field in scores}
    total = sum(given.values())
    return sum(scores[field] * weight for field, weight in given.items()) / total if total else 0.0
