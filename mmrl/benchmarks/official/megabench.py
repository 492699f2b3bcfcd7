"""MEGA-Bench's credit for an answer: a metric for each of its fields, and how they are put together.

Source: megabench/evaluation_processor.py of github.com/TIGER-AI-Lab/MEGA-Bench (arXiv:2410.10563). Departures: the
answer is what the rules of this room find, instead of each task's own prefix; those of the metrics
(`megabench_metrics`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from statistics import fmean
from typing import Any

from mmrl.benchmarks.extraction.extract import Extraction
from mmrl.benchmarks.extraction.text import answer_span
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.benchmarks.official.megabench_metrics import (
    CONTEXT_METRICS,
    FIELD_METRICS,
    FORMULA_TEXT_METRICS,
    MULTILINE_METRICS,
    STRICT_METRICS,
)
from mmrl.benchmarks.official.megabench_values import MAX_FIELD_CHARS, select_fields
from mmrl.types import UserError


def score_megabench(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """The credit of an answer: of its fields' metrics, in `meta.metric`, the mean or the least, as `meta.aggregation`
    says. One metric alone is that of an answer without fields.

    Raises:
        UserError: a metric is none of those here.
    """
    metrics = _field_metrics(item)
    for name in metrics.values():
        if name not in FIELD_METRICS:
            raise UserError(
                f"item {item.id!r}: the metric {name!r} cannot be scored by rule; those that can: {', '.join(FIELD_METRICS)}"
            )
    said = _predicted_fields(item, response, extraction)
    scores = {
        field: FIELD_METRICS[name](said[field], _reference_value(item, field, name)) for field, name in metrics.items()
    }
    return _aggregate(scores, item.meta.get("aggregation") or {})


def has_full_score(item: Item, response: ItemResponse, extraction: Extraction, field: str) -> bool:
    """Whether a field is right by its metric, of those whose full credit a careful reader would give too."""
    name = _field_metrics(item).get(field, "")
    return (
        name in STRICT_METRICS
        and FIELD_METRICS[name](
            _predicted_fields(item, response, extraction)[field], _reference_value(item, field, name)
        )
        == 1.0
    )


def macro_mean(results: Sequence[tuple[Item, ItemResponse, Extraction]]) -> float:
    """MEGA-Bench's number: the mean over tasks of each task's mean credit."""
    tasks: dict[str, list[float]] = {}
    for item, response, found in results:
        tasks.setdefault(str(item.meta.get("task")), []).append(score_megabench(item, response, found))
    return fmean(map(fmean, tasks.values())) if tasks else 0.0


def _predicted_fields(item: Item, response: ItemResponse, extraction: Extraction) -> Mapping[str, Any]:
    """What a response says for each field."""
    metrics = _field_metrics(item)
    return select_fields(_answer_text(item, response, extraction, {*metrics.values()})[-MAX_FIELD_CHARS:], [*metrics])


def _answer_text(item: Item, response: ItemResponse, extraction: Extraction, metrics: Set[str]) -> str:
    """All that answers, where there are several fields; of one field what was found, with the lines that follow where
    several are due, and the dollar signs around it where they tell formulas from words.
    """
    part = answer_span(response.text)
    if part is None or not extraction.value:
        return ""
    if len(_field_metrics(item)) > 1:
        return response.text[part.start : part.end]
    start, end = extraction.start, extraction.end
    if extraction.rule == "announced_text" and (metrics & MULTILINE_METRICS or "\n" in str(item.answer)):
        return response.text[start : part.end].strip()
    if metrics & FORMULA_TEXT_METRICS:
        return response.text[start - (response.text[:start][-1:] == "$") : end + (response.text[end : end + 1] == "$")]
    return extraction.value[:MAX_FIELD_CHARS]


def _field_metrics(item: Item) -> Mapping[str, str]:
    """The metric of each field; that of an answer without fields is called by no name."""
    named = item.meta.get("metric")
    return {field: str(name) for field, name in (named if isinstance(named, Mapping) else {"": named}).items()}


def _reference_value(item: Item, field: str, metric: str) -> Any:  # noqa: ANN401 - whatever a table holds
    context = item.meta.get("context")
    if metric in CONTEXT_METRICS and context:
        return context
    return item.answer[field] if isinstance(item.answer, Mapping) else item.answer


def _aggregate(scores: Mapping[str, float], aggregation: Mapping[str, Any]) -> float:
    if aggregation.get("function") == "min":
        return min(scores.values())
    weights = aggregation.get("field_weights") or {}
    given = {field: float(weights.get(field, 1.0)) for field in scores}
    total = sum(given.values())
    return sum(scores[field] * weight for field, weight in given.items()) / total if total else 0.0
