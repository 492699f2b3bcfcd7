"""Layout of MEGA-Bench's table: media of task, example and question, and a metric for each field of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mmrl.benchmarks.megabench.metrics import CONTEXT_METRICS, FIELD_METRICS
from mmrl.benchmarks.megabench.planning import parse_problem
from mmrl.benchmarks.readers.layouts import QuestionRow, UnscorableRowError
from mmrl_datasets.formats.row import BadRowError, Cells, short_repr
from mmrl_datasets.readers.answers import check_text
from mmrl_datasets.readers.media_resolver import MediaResolver
from mmrl_datasets.readers.row_to_sample import parse_literal

_VIDEO_SUFFIXES: Final = (".mp4", ".mkv", ".avi", ".webm", ".mov")
_MEDIA_COLUMNS: Final = ("global_media", "example_media", "query_media")


class MegaBenchLayout:
    """MEGA-Bench of Hugging Face (TIGER-Lab/MEGA-Bench), whose cells hold Python literals.

    `answer` maps fields to values, `metric_info` has the metric of each field and their aggregation, `eval_context` has
    what some metrics need besides the answer.
    """

    name = "MEGA-Bench of Hugging Face"
    required_columns = frozenset({"id", "task_name", "task_description", "query_text", "answer", "metric_info"})

    def parse_row(self, cells: Cells, files: MediaResolver, file: str) -> Sequence[QuestionRow]:
        """Return the question of a row.

        Raises:
            BadRowError: a cell holds an impossible value.
            UnscorableRowError: a field has no metric that works by rule.
        """
        metric_info = _parse_mapping(cells["metric_info"], "metric_info")
        answer = _parse_mapping(cells["answer"], "answer")
        metrics = _parse_metrics(metric_info, answer, str(cells["task_name"]))
        context: Mapping[str, Any] = {}
        if CONTEXT_METRICS & {*metrics.values()}:
            context = _parse_mapping(cells["eval_context"], "eval_context")
        if "symbolic_planning_test" in metrics.values():
            try:
                parse_problem(context)
            except ValueError as error:
                raise UnscorableRowError(f"{cells['task_name']}: no plan can be carried out: {error}") from error
        texts = (cells["task_description"], cells.get("example_text"), cells["query_text"])
        columns = {
            "id": cells["id"],
            "question": "\n".join(check_text(text, "question") for text in texts if text),
            "answer": {name: answer[name] for name in metrics},
            "answer_type": "text",
            "meta": {
                "task": cells["task_name"],
                **{name: cells.get(name) for name in ("application", "input_format", "output_format")},
                "metric": dict(metrics),
                "aggregation": metric_info.get("aggregation") or {},
                "context": context,
            },
        }
        media = [path for name in _MEDIA_COLUMNS for path in _parse_paths(cells.get(name))]
        videos = [path for path in media if path.lower().endswith(_VIDEO_SUFFIXES)]
        images = [path for path in media if path not in videos]
        return (QuestionRow(columns, images, videos),)


def _parse_metrics(metric_info: Mapping[str, Any], answer: Mapping[str, Any], task: str) -> Mapping[str, Any]:
    """Return the metric of each field; raise UnscorableRowError for one that needs a judge or scores no field."""
    metrics = _parse_mapping(metric_info.get("field_score_function"), "field_score_function")
    unknown = sorted({*map(str, metrics.values())} - FIELD_METRICS.keys())
    if unknown or not metrics:
        raise UnscorableRowError(f"{task}: no rule scores {', '.join(unknown) or 'no field'}")
    no_fields = [*metric_info.get("global_aux_metrics", {}), *(name for name in metrics if name not in answer)]
    if no_fields:
        raise UnscorableRowError(f"{task}: no rule scores the field {', '.join(map(str, no_fields))}")
    return metrics


def _parse_mapping(written: object, role: str) -> Mapping[str, Any]:
    value = parse_literal(written, role) if isinstance(written, str) else written
    if not isinstance(value, Mapping):
        raise BadRowError(f"{role} must be a mapping, is {short_repr(written)}")
    return value


def _parse_paths(written: object) -> list[str]:
    """Return the paths of a list, or of a text that writes one."""
    entries = parse_literal(written, "media") if isinstance(written, str) and written.strip() else written
    return [check_text(entry, "path") for entry in entries] if isinstance(entries, list) else []
