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
from mmrl.benchmarks.megabench.planning import parse_problem


def score_megabench(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Return the mean or minimum of the fields' metrics, in [0, 1], as `meta.aggregation` says.

    `meta.metric` maps fields to metrics, or is the one metric of an answer without fields. The item has passed
    `find_megabench_problem`.
    """
    metrics = _field_metrics(item)
    scores = {field: _score_field(item, response, extraction, field) for field in metrics}
    aggregation = item.meta.get("aggregation") or {}
    if aggregation.get("function") == "min":
        return min(scores.values())
    field_weights = aggregation.get("field_weights") or {}
    weights = {field: float(field_weights.get(field, 1.0)) for field in scores}
    total = sum(weights.values())
    return sum(scores[field] * weight for field, weight in weights.items()) / total if total else 0.0


def find_megabench_problem(item: Item) -> str:
    """Return why the metrics in an item's `meta` cannot score it; an empty text if they can."""
    metrics, aggregation, context = _field_metrics(item), item.meta.get("aggregation"), item.meta.get("context")
    unknown = sorted({*metrics.values()} - FIELD_METRICS.keys())
    if unknown or not metrics:
        return f"meta.metric is {item.meta.get('metric')!r:.80}; metrics that work by rule: {', '.join(FIELD_METRICS)}"
    for field, name in metrics.items():
        needs_answer = name not in CONTEXT_METRICS or not context
        if needs_answer and isinstance(item.answer, Mapping) and field not in item.answer:
            return f"meta.metric scores the field {field!r}, and the answer has only {', '.join(map(str, item.answer))}"
        if name == "xml_norm_point_in_bbox" and isinstance(context, Mapping) and context:
            if not isinstance(context.get("bounding_boxes"), Sequence):
                return f"{name} needs a list `bounding_boxes` in meta.context, which has {', '.join(map(str, context))}"
        elif name == "symbolic_planning_test":
            try:
                parse_problem(context if isinstance(context, Mapping) else {})
            except ValueError as error:
                return f"{name}: meta.context holds no problem: {error}"
    try:
        for weight in ((aggregation or {}).get("field_weights") or {}).values():
            float(weight)
    except (AttributeError, TypeError, ValueError):
        return f"meta.aggregation is {aggregation!r:.80}; give an object, with a number for each of its `field_weights`"
    return ""


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
