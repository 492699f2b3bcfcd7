"""MEGA-Bench's score of an answer: a metric for each field, aggregated as the task says.

Source: megabench/evaluation_processor.py of github.com/TIGER-AI-Lab/MEGA-Bench (arXiv:2410.10563). Departures: the
answer is the one that our extraction rules find, in place of each task's own prefix; `metrics.py` has the
departures of the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from statistics import fmean

from mmrl.benchmarks.benchmark import GradedResponse
from mmrl.benchmarks.extraction import match
from mmrl.benchmarks.extraction.fields import MAX_FIELD_CHARS, select_fields
from mmrl.benchmarks.extraction.text import Extraction, answer_span
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.benchmarks.megabench.metrics import (
    CONTEXT_METRICS,
    FIELD_METRICS,
    FORMULA_TEXT_METRICS,
    MULTILINE_METRICS,
    STRICT_METRICS,
)
from mmrl.types import UserError


def score_megabench(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Return the mean or minimum of the fields' metrics, in [0, 1], as `meta.aggregation` says.

    `meta.metric` maps fields to metrics, or is the one metric of an answer without fields.

    Raises:
        UserError: a metric needs a judge or a program, so no rule computes it.
    """
    metrics = _field_metrics(item)
    for name in metrics.values():
        if name not in FIELD_METRICS:
            raise UserError(
                f"item {item.id!r}: the metric {name!r} cannot be scored by rule; metrics that can: "
                f"{', '.join(FIELD_METRICS)}"
            )
    scores = {field: _score_field(item, response, extraction, field) for field in metrics}
    aggregation = item.meta.get("aggregation") or {}
    if aggregation.get("function") == "min":
        return min(scores.values())
    field_weights = aggregation.get("field_weights") or {}
    weights = {field: float(field_weights.get(field, 1.0)) for field in scores}
    total = sum(weights.values())
    return sum(scores[field] * weight for field, weight in weights.items()) / total if total else 0.0


def is_correct_megabench(item: Item, response: ItemResponse, extraction: Extraction) -> bool:
    """Return True if the answer equals the item's, or if a metric in `STRICT_METRICS` gives it full marks."""
    if match.is_correct(item, response, extraction):
        return True
    if extraction.value is None or extraction.number is not None or item.answer_type != "text":
        return False
    if not isinstance(item.answer, Mapping):
        return _has_full_marks(item, response, extraction, "")
    predicted = select_fields(extraction.value, [*item.answer])
    return all(
        match.texts_equal(str(predicted[field]), str(value)) or _has_full_marks(item, response, extraction, field)
        for field, value in item.answer.items()
    )


def macro_mean(results: Sequence[GradedResponse]) -> float:
    """Return MEGA-Bench's headline number: the mean over tasks of each task's mean score."""
    scores_by_task: dict[str, list[float]] = {}
    for item, response, extraction in results:
        # A malformed row names neither metric nor task, and counts as a task that failed.
        score = score_megabench(item, response, extraction) if "metric" in item.meta else 0.0
        scores_by_task.setdefault(str(item.meta.get("task")), []).append(score)
    return fmean(map(fmean, scores_by_task.values())) if scores_by_task else 0.0


def _has_full_marks(item: Item, response: ItemResponse, extraction: Extraction, field: str) -> bool:
    # The full marks of other metrics do not show that a careful reader would call the answer correct.
    is_strict = _field_metrics(item).get(field) in STRICT_METRICS
    return is_strict and _score_field(item, response, extraction, field) == 1.0


def _score_field(item: Item, response: ItemResponse, extraction: Extraction, field: str) -> float:
    metrics, context = _field_metrics(item), item.meta.get("context")
    text = _answer_text(item, response, extraction, {*metrics.values()})
    predicted = select_fields(text[-MAX_FIELD_CHARS:], [*metrics])[field]
    if metrics[field] in CONTEXT_METRICS and context:
        reference = context
    else:
        reference = item.answer[field] if isinstance(item.answer, Mapping) else item.answer
    return FIELD_METRICS[metrics[field]](predicted, reference)


def _answer_text(item: Item, response: ItemResponse, extraction: Extraction, metrics: Set[str]) -> str:
    """Return the text that metrics read: for several fields the whole answer, for one field what the rules found."""
    answer = answer_span(response.text)
    if answer is None or not extraction.value:
        return ""
    if len(_field_metrics(item)) > 1:
        return response.text[answer.start : answer.end]
    start, end = extraction.start, extraction.end
    # The rules find one line after an announcement; some metrics also read the lines that follow.
    if extraction.rule == "announced_text" and (metrics & MULTILINE_METRICS or "\n" in str(item.answer)):
        return response.text[start : answer.end].strip()
    if metrics & FORMULA_TEXT_METRICS:
        # The dollar signs around it mark it as a formula.
        start -= response.text[:start][-1:] == "$"
        end += response.text[end : end + 1] == "$"
        return response.text[start:end]
    return extraction.value[:MAX_FIELD_CHARS]


def _field_metrics(item: Item) -> Mapping[str, str]:
    """Return the metric of each field; an answer without fields has one field, with an empty name."""
    metric = item.meta.get("metric")
    by_field = metric if isinstance(metric, Mapping) else {"": metric}
    return {field: str(name) for field, name in by_field.items()}
