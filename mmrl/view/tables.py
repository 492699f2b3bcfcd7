"""Metrics, settings and benchmark predictions of a run, as the page shows them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mmrl.config import flatten_settings
from mmrl.config.secrets import mask_secret
from mmrl.log.metric_registry import find_builtin_metric
from mmrl.view.records import Row, RunFiles, as_mapping, make_key, pick

_VERDICT_KEYS: Final = ("strict", "official", "score", "outcome", "rule", "value", "judge_correct")


def build_metrics(lines: Iterable[Row]) -> dict[str, Any]:
    """Return the document of metrics and timings, as columns with one entry for each step.

    Lines of one stage and step are merged; the last value of a metric counts, as a resumed run repeats the timings of
    its last steps. Between stages the stage is None.
    """
    points: dict[tuple[str | None, int], Row] = {}
    for row in lines:
        stage, step = row.get("stage"), row.get("step")
        if isinstance(step, int) and isinstance(stage, str | None):
            points.setdefault((stage, step), {}).update(row)
    # Steps from the start of the run. What is measured between stages belongs to the end of the one before.
    running: dict[tuple[str | None, int], int] = {}
    starts: dict[str, int] = {}
    latest = 0
    for stage, step in points:
        if stage is not None:
            latest = starts.setdefault(stage, latest) + step
        running[stage, step] = latest
    places = sorted(points, key=lambda place: running[place])
    columns: dict[str, list[float | None]] = {}
    for index, place in enumerate(places):
        for name, value in points[place].items():
            if name not in ("stage", "step") and isinstance(value, int | float | None):
                # Nobody sees more digits on a curve, and a page of all of them is twice as large.
                rounded = float(f"{value:.6g}") if isinstance(value, float) else value
                columns.setdefault(name, [None] * len(places))[index] = rounded
    known = {name: find_builtin_metric(name) for name in columns}
    return {
        "stage": [stage for stage, _ in places],
        "step": [step for _, step in places],
        "global": [running[place] for place in places],
        "columns": dict(sorted(columns.items())),
        "meanings": {name: metric.meaning for name, metric in known.items() if metric is not None},
    }


def list_settings(settings: Mapping[str, Any]) -> list[list[str]]:
    """Return dotted path and text of every setting. Of texts, keys, tokens, passwords and users in URLs are masked."""
    rows = []
    # By name, so that two runs are compared stage by stage.
    stages = {str(as_mapping(each).get("name", place)): each for place, each in enumerate(settings.get("stages") or ())}
    for path, value in flatten_settings({**settings, **({"stages": stages} if stages else {})}).items():
        text = mask_secret(path, value)
        rows.append([path, text if isinstance(text, str) else json.dumps(text)])
    return rows


def list_benchmarks(files: RunFiles, stages: Sequence[Row]) -> dict[str, tuple[Path, Row]]:
    """Return the benchmarks of a run with these stages: by the end of the key, folder and entry of the index."""
    folders = sorted((files.root / "benchmarks").glob("*/*"))
    # A folder of `mmrl eval` is one benchmark.
    if (files.root / "predictions.jsonl").exists() or (files.root / "verdicts.jsonl").exists():
        folders.append(files.root)
    found = {}
    for path in folders:
        report = files.read_object(path / "report.json")
        name = str(report.get("benchmark") or path.resolve().name) if path == files.root else path.parent.name
        # Folders of a run are named as checkpoints: number of the stage and steps, 01-000100.
        stage, _, step = path.name.partition("-")
        label = path.name
        if stage.isdecimal() and step.isdecimal() and int(stage) < len(stages):
            label = f"{stages[int(stage)]['name']} {int(step)}"
        entry = {"name": name, "label": label, **pick(report, "items")}
        entry["accuracy"] = as_mapping(report.get("strict")).get("value")
        found[f"bench-{make_key(name)}-{make_key(path.name)}"] = (path, entry)
    return found


def build_benchmark(files: RunFiles, path: Path, name: str) -> dict[str, Any]:
    """Return the document of the benchmark in a folder."""
    # By item and number of the response, as text, whatever a damaged row holds.
    verdicts = {str(pick(row, "pid", "sample")): row for _, row in files.read_lines(path / "verdicts.jsonl")}
    items: dict[str, Row] = {}
    for _, row in files.read_lines(path / "predictions.jsonl"):
        _add_response(items, row, verdicts.pop(str(pick(row, "pid", "sample")), {}))
    # Items without a response have a verdict alone.
    for verdict in verdicts.values():
        _add_response(items, pick(verdict, "pid"), verdict)
    report = files.read_object(path / "report.json")
    scores = {
        "accuracy": as_mapping(report.get("strict")).get("value"),
        "official accuracy": as_mapping(report.get("official")).get("value"),
        "official score": report.get("score"),
        **as_mapping(report.get("overall")),
        **{name: report.get(f"{name.replace(' ', '_')}_rate") for name in ("truncated", "no answer")},
        "mean tokens": report.get("mean_tokens"),
    }
    metrics = [[key, value] for key, value in scores.items() if value is not None]
    return {"name": name, "metrics": metrics, "items": list(items.values())}


def _add_response(items: dict[str, Row], row: Row, verdict: Row) -> None:
    item = items.setdefault(str(row.get("pid")), {"id": str(row.get("pid")), "responses": [], "subsets": {}})
    item["subsets"] = item["subsets"] or as_mapping(verdict.get("subsets"))
    text = str(row.get("response") or "")
    start, end = verdict.get("start"), verdict.get("end")
    # Of the text that was read as the answer.
    span = [start, end] if isinstance(start, int) and isinstance(end, int) else None
    response = {"response": text, **pick(verdict, *_VERDICT_KEYS), **pick(row, "tokens", "finish"), "span": span}
    item["responses"].append(response)
