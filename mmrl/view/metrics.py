"""Metrics and timings of a run as columns, one entry for each step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.log.metric_registry import find_builtin_metric
from mmrl.view.records import Row

_Place = tuple[str | None, int]  # stage, or None between stages, and step


def build_metrics(lines: Sequence[Row], timings: Sequence[Row], stage_steps: Mapping[str, int]) -> dict[str, Any]:
    """Return the document of the metrics.

    Lines of one stage and step are merged; the last value of a metric counts, as a resumed run repeats the timings of
    its last steps. `stage_steps` has the number of steps of each stage, which the running number is counted by.
    """
    points: dict[_Place, dict[str, float | None]] = {}
    for row in (*lines, *timings):
        stage, step = row.get("stage"), row.get("step")
        if not isinstance(step, int) or not isinstance(stage, str | None):
            continue
        values = points.setdefault((stage, step), {})
        for name, value in row.items():
            if name not in ("stage", "step") and isinstance(value, int | float | None):
                values[name] = value
    running = _running_numbers(list(points), stage_steps)
    places = sorted(points, key=lambda place: running[place])
    columns: dict[str, list[float | None]] = {}
    for index, place in enumerate(places):
        for name, value in points[place].items():
            columns.setdefault(name, [None] * len(places))[index] = _round(value)
    meanings = {}
    for name in columns:
        metric = find_builtin_metric(name)
        if metric is not None:
            meanings[name] = metric.meaning
    return {
        "stage": [stage for stage, _ in places],
        "step": [step for _, step in places],
        "global": [running[place] for place in places],
        "columns": dict(sorted(columns.items())),
        "meanings": meanings,
    }


def _running_numbers(places: Sequence[_Place], stage_steps: Mapping[str, int]) -> dict[_Place, int]:
    """Return the steps from the start of the run to each place, which are in the order of the file."""
    longest: dict[str, int] = dict(stage_steps)
    for stage, step in places:
        if stage is not None:
            longest[stage] = max(step, longest.get(stage, 0))
    starts, total = {}, 0
    for stage, steps in longest.items():
        starts[stage], total = total, total + steps
    numbers, latest = {}, 0
    for stage, step in places:
        # What is measured between stages belongs to the end of the one before.
        latest = latest if stage is None else starts[stage] + step
        numbers[stage, step] = latest
    return numbers


def _round(value: float | None) -> float | None:
    if value is None or isinstance(value, int):
        return value
    # Nobody sees more on a curve, and a page of all digits is twice as large.
    return float(f"{value:.6g}") if math.isfinite(value) else None
