"""The table of MEGA-Bench: media of the task, its example and the question; a metric for each field of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mmrl.benchmarks.official.megabench_metrics import CONTEXT_METRICS, FIELD_METRICS
from mmrl.benchmarks.official.planning import parse_problem
from mmrl.benchmarks.readers.layouts import QuestionRow
from mmrl_datasets.formats.row import BadRowError, Cells, short_repr
from mmrl_datasets.readers.answers import check_text
from mmrl_datasets.readers.media_resolver import MediaResolver
from mmrl_datasets.readers.row_to_sample import parse_literal

_VIDEO_SUFFIXES: Final = (".mp4", ".mkv", ".avi", ".webm", ".mov")


class UnscorableRowError(BadRowError):
    """A row that no rule can score."""


@dataclass(frozen=True, slots=True)
class MegaBenchLayout:
    """MEGA-Bench of Hugging Face, whose cells write Python: `answer` a mapping of fields, `metric_info` the metric of
    each and how they are put together, `eval_context` what some metrics need besides.
    """

    name: str = "MEGA-Bench of Hugging Face"
    required_columns: frozenset[str] = frozenset(
        {"id", "task_name", "task_description", "query_text", "answer", "metric_info"}
    )
    needs_coordinate_system: bool = False

    def parse_row(self, cells: Cells, files: MediaResolver, file: str) -> Sequence[QuestionRow]:
        """The question of a row. Raises BadRowError, and LeftOutError for one that is not of the core."""
        info, answers = _parse_mapping(cells["metric_info"], "metric_info"), _parse_mapping(cells["answer"], "answer")
        metrics = _parse_mapping(info.get("field_score_function"), "field_score_function")
        unknown = sorted({*map(str, metrics.values())} - FIELD_METRICS.keys())
        if unknown or not metrics:
            raise UnscorableRowError(f"{cells['task_name']}: no rule scores {', '.join(unknown) or 'no field'}")
        if lacking := [*info.get("global_aux_metrics", {}), *(name for name in metrics if name not in answers)]:
            raise UnscorableRowError(f"{cells['task_name']}: no rule scores the field {', '.join(map(str, lacking))}")
        context = _parse_mapping(cells["eval_context"], "eval_context") if CONTEXT_METRICS & {*metrics.values()} else {}
        if "symbolic_planning_test" in metrics.values():
            _check_planning(str(cells["task_name"]), context)
        media = [
            path for name in ("global_media", "example_media", "query_media") for path in _parse_paths(cells.get(name))
        ]
        texts = (cells["task_description"], cells.get("example_text"), cells["query_text"])
        columns = {
            "id": cells["id"],
            "question": "\n".join(text for text in texts if text),
            "answer": {name: answers[name] for name in metrics},
            "answer_type": "text",
            "meta": {
                "task": cells["task_name"],
                **{name: cells.get(name) for name in ("application", "input_format", "output_format")},
                "metric": dict(metrics),
                "aggregation": info.get("aggregation") or {},
                "context": context,
            },
        }
        films = [path for path in media if path.lower().endswith(_VIDEO_SUFFIXES)]
        return (QuestionRow(columns, [path for path in media if path not in films], films),)


def _check_planning(task: str, context: Mapping[str, Any]) -> None:
    try:
        parse_problem(context)
    except ValueError as error:
        raise UnscorableRowError(f"{task}: no plan can be carried out: {error}") from error


def _parse_mapping(written: object, role: str) -> Mapping[str, Any]:
    value = parse_literal(written, role) if isinstance(written, str) else written
    if not isinstance(value, Mapping):
        raise BadRowError(f"{role} must be a mapping, is {short_repr(written)}")
    return value


def _parse_paths(written: object) -> list[str]:
    """Paths, in a list or in text that writes one."""
    entries = parse_literal(written, "media") if isinstance(written, str) and written.strip() else written
    return [check_text(entry, "path") for entry in entries] if isinstance(entries, list) else []
