"""The table of MEGA-Bench: media of the task, its example and the question; a metric for each field of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mmrl.benchmarks.official.megabench_metrics import CONTEXTUAL, METRICS
from mmrl.benchmarks.official.planning import problem_of
from mmrl.benchmarks.readers.layouts import Asked
from mmrl_datasets.formats.row import BadRowError, Cells, shown
from mmrl_datasets.readers.answers import text
from mmrl_datasets.readers.media_resolver import MediaFiles
from mmrl_datasets.readers.row_to_sample import literal

_FILMS: Final = (".mp4", ".mkv", ".avi", ".webm", ".mov")


class LeftOutError(BadRowError):
    """A row that no rule can score."""


@dataclass(frozen=True, slots=True)
class MegaBench:
    """MEGA-Bench of Hugging Face, whose cells write Python: `answer` a mapping of fields, `metric_info` the metric of
    each and how they are put together, `eval_context` what some metrics need besides.
    """

    name: str = "MEGA-Bench of Hugging Face"
    needs: frozenset[str] = frozenset({"id", "task_name", "task_description", "query_text", "answer", "metric_info"})
    asks_frame: bool = False

    def read(self, cells: Cells, files: MediaFiles, file: str) -> Sequence[Asked]:
        """The question of a row. Raises BadRowError, and LeftOutError for one that is not of the core."""
        info, answers = _mapping(cells["metric_info"], "metric_info"), _mapping(cells["answer"], "answer")
        metrics = _mapping(info.get("field_score_function"), "field_score_function")
        unknown = sorted({*map(str, metrics.values())} - METRICS.keys())
        if unknown or not metrics:
            raise LeftOutError(f"{cells['task_name']}: no rule scores {', '.join(unknown) or 'no field'}")
        if lacking := [*info.get("global_aux_metrics", {}), *(name for name in metrics if name not in answers)]:
            raise LeftOutError(f"{cells['task_name']}: no rule scores the field {', '.join(map(str, lacking))}")
        context = _mapping(cells["eval_context"], "eval_context") if CONTEXTUAL & {*metrics.values()} else {}
        if "symbolic_planning_test" in metrics.values():
            _check_planning(str(cells["task_name"]), context)
        media = [path for name in ("global_media", "example_media", "query_media") for path in _paths(cells.get(name))]
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
        films = [path for path in media if path.lower().endswith(_FILMS)]
        return (Asked(columns, [path for path in media if path not in films], films),)


def _check_planning(task: str, context: Mapping[str, Any]) -> None:
    try:
        problem_of(context)
    except ValueError as error:
        raise LeftOutError(f"{task}: no plan can be carried out: {error}") from error


def _mapping(written: object, role: str) -> Mapping[str, Any]:
    value = literal(written, role) if isinstance(written, str) else written
    if not isinstance(value, Mapping):
        raise BadRowError(f"{role} must be a mapping, is {shown(written)}")
    return value


def _paths(written: object) -> list[str]:
    """Paths, in a list or in text that writes one."""
    entries = literal(written, "media") if isinstance(written, str) and written.strip() else written
    return [text(entry, "path") for entry in entries] if isinstance(entries, list) else []
