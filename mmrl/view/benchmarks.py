"""Documents of benchmarks: predictions, each with its verdict, the span that was read and the rule that read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.view.questions import QuestionLookup
from mmrl.view.records import Row, RunFiles, RunFolder, as_list, as_mapping, make_key
from mmrl.view.steps import utf16_positions

_VERDICT_KEYS = ("strict", "official", "score", "outcome", "rule", "value", "judge_correct")
_MAX_ITEMS_WITH_MEDIA = 500  # in the order of the predictions; more would make a page of gigabytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkFolder:
    """A folder of predictions and verdicts."""

    key: str  # key of its document
    name: str  # name of the benchmark
    label: str  # a few words for people, such as the step it was taken at
    path: Path  # the folder


def list_benchmarks(folder: RunFolder, files: RunFiles, stages: list[str]) -> list[BenchmarkFolder]:
    """Return the benchmarks of a run with the stages `stages`, or the one that an evaluation is."""
    if folder.kind == "eval":
        name = str(files.read_object("report.json").get("benchmark") or folder.path.name)
        return [BenchmarkFolder(key=f"{folder.id}/bench-{make_key(name)}", name=name, label=name, path=folder.path)]
    found = []
    for path in sorted((folder.path / "benchmarks").glob("*/*")):
        if not path.is_dir():
            continue
        name = path.parent.name
        key = f"{folder.id}/bench-{make_key(name)}-{make_key(path.name)}"
        # Folders are named as checkpoints: number of the stage and steps, 01-000100.
        stage, _, step = path.name.partition("-")
        label = path.name
        if stage.isdecimal() and step.isdecimal() and int(stage) < len(stages):
            label = f"{stages[int(stage)]} {int(step)}"
        found.append(BenchmarkFolder(key=key, name=name, label=label, path=path))
    return found


def describe_benchmark(benchmark: BenchmarkFolder, files: RunFiles) -> dict[str, Any]:
    """Return the index's entry of a benchmark."""
    report = read_report(benchmark, files)
    items = report.get("items")
    if items is None:
        items = files.read_cached(benchmark.path / "predictions.jsonl", _count_lines, 0)
    return {
        "key": benchmark.key,
        "name": benchmark.name,
        "label": benchmark.label,
        "items": items,
        "accuracy": as_mapping(report.get("strict")).get("value"),
    }


def build_benchmark(
    benchmark: BenchmarkFolder,
    files: RunFiles,
    questions: QuestionLookup | None,
    describe_medium: Callable[[object], dict[str, Any]],
) -> dict[str, Any]:
    """Return the document of a benchmark. Without its questions, items have an id alone.

    `describe_medium` returns the entry of a recorded medium of a question.
    """
    report = read_report(benchmark, files)
    verdicts: dict[tuple[str, str], Row] = {}
    for row in _lines(benchmark.path / "verdicts.jsonl", files):
        verdicts[_response_key(row)] = row
    items: dict[str, dict[str, Any]] = {}
    sizes: dict[str, list[Any]] = {}  # by item, of its media
    for row in _lines(benchmark.path / "predictions.jsonl", files):
        verdict = verdicts.pop(_response_key(row), {})
        _add_response(items, row, verdict)
        sizes.setdefault(str(row.get("pid")), as_list(row.get("sizes")))
    # Items without a response have a verdict alone.
    for verdict in verdicts.values():
        _add_response(items, {"pid": verdict.get("pid"), "response": ""}, verdict)
    for number, item in enumerate(items.values()):
        if questions is None:
            break
        item.update(questions.describe(item["id"]))
        if number < _MAX_ITEMS_WITH_MEDIA:
            item["media"] = list(map(describe_medium, questions.list_media(item["id"], sizes.get(item["id"], []))))
    return {"name": benchmark.name, "metrics": _list_metrics(report), "items": list(items.values())}


def _response_key(row: Row) -> tuple[str, str]:
    """Return item and number of a response, as text, whatever a damaged row holds."""
    return str(row.get("pid")), str(row.get("sample"))


def _add_response(items: dict[str, dict[str, Any]], row: Row, verdict: Row) -> None:
    item_id = str(row.get("pid"))
    item = items.setdefault(
        item_id, {"id": item_id, "question": "", "target": None, "media": [], "responses": [], "subsets": {}}
    )
    item["subsets"] = item["subsets"] or as_mapping(verdict.get("subsets"))
    response = row.get("response")
    text = response if isinstance(response, str) else ""
    positions = utf16_positions(text)
    span = {}
    for key in ("start", "end"):
        place = verdict.get(key)
        if positions is not None and isinstance(place, int):
            place = positions[max(0, min(place, len(positions) - 1))]
        span[key] = place
    kept = {key: verdict.get(key) for key in _VERDICT_KEYS}
    item["responses"].append(
        {"response": text, **kept, **span, "tokens": row.get("tokens"), "finish": row.get("finish")}
    )


def _list_metrics(report: Mapping[str, Any]) -> list[list[Any]]:
    """Return name and value of the scores in a report, the most important first."""
    rows = [
        ["accuracy", as_mapping(report.get("strict")).get("value")],
        ["official accuracy", as_mapping(report.get("official")).get("value")],
        ["official score", report.get("score")],
        *([name, value] for name, value in as_mapping(report.get("overall")).items()),
        ["truncated", report.get("truncated_rate")],
        ["no answer", report.get("no_answer_rate")],
        ["mean tokens", report.get("mean_tokens")],
    ]
    return [row for row in rows if row[1] is not None]


def read_report(benchmark: BenchmarkFolder, files: RunFiles) -> Row:
    """Return the report of a benchmark; an empty one before there is one."""
    return files.read_object((benchmark.path / "report.json").relative_to(files.root).as_posix())


def _lines(path: Path, files: RunFiles) -> Iterator[Row]:
    for _, row in files.read_lines(path):
        yield row


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)
