"""Reads metrics.jsonl and timings.jsonl while a run writes them, and numbers their lines by the global step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.log.run_dir import RunDir
from mmrl.trackers.tracker import Point


class RunLines:
    """Yields the lines that were not read yet."""

    def __init__(self, run_dir: RunDir) -> None:
        """Start at the first line of both files."""
        self._metrics, self._timings = _GrowingFile(run_dir.metrics), _GrowingFile(run_dir.timings)
        self._first_steps: dict[str, int] = {}  # global step at which each stage began, in the order of the stages
        self._last_step = 0  # global step of the last line of metrics.jsonl

    def read_new(self) -> tuple[list[Point], list[Point]]:
        """Return the new lines of metrics.jsonl and of timings.jsonl as points."""
        # The timings first: a step's line of metrics is written before its line of timings, so it is read here too.
        timings = self._timings.read_new()
        metrics = [self._to_point(record) for record in self._metrics.read_new()]
        # A step that a killed run repeats has several lines of timings, of which the last counts.
        latest: dict[int, Point] = {}
        for record in timings:
            step = self.find_global_step(record["stage"], record["step"])
            # Lines of steps that are not in metrics.jsonl are from before a kill; those steps are done once more.
            if step is not None:
                latest[step] = Point(global_step=step, stage=record["stage"], values=_finite_values(record))
        return metrics, list(latest.values())

    def find_global_step(self, stage: str, step: int) -> int | None:
        """Return the global step of a stage's step; None if metrics.jsonl has no line of it or of a later one yet."""
        if stage not in self._first_steps:
            return None
        global_step = self._first_steps[stage] + step
        return global_step if global_step <= self._last_step else None

    def _to_point(self, record: Mapping[str, Any]) -> Point:
        stage, values = record["stage"], _finite_values(record)
        if stage is not None:
            first_step = self._first_steps.setdefault(stage, self._last_step)
            self._last_step = max(self._last_step, first_step + record["step"])
            index = list(self._first_steps).index(stage) + 1
            values |= {"stage/index": float(index), "stage/step": float(record["step"])}
        return Point(global_step=self._last_step, stage=stage, values=values)


class _GrowingFile:
    """A file of JSON lines to which another process appends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0  # bytes that were read

    def read_new(self) -> list[dict[str, Any]]:
        """Return the complete lines that were appended since the last call; none if there is no file yet."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._position += len(complete) + len(newline)
        return list(map(json.loads, complete.splitlines()))


def _finite_values(record: Mapping[str, Any]) -> dict[str, float]:
    values = {}
    for name, value in record.items():
        if name not in ("stage", "step") and isinstance(value, int | float) and math.isfinite(value):
            values[name] = float(value)
    return values
