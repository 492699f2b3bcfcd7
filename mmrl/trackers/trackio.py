"""Sends a run to Trackio's database on this machine, and to a Space of Hugging Face if the config names one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import trackio
from trackio.sqlite_storage import SQLiteStorage

from mmrl.config.schema.trackers import TrackioConfig
from mmrl.trackers.pictures import draw_boxes
from mmrl.trackers.tracker import Picture, Point, RunFacts, RunStatus

_MAX_WAIT_S: Final = 20.0


class TrackioTracker:
    """A run of Trackio."""

    rewinds = False

    def __init__(self, options: TrackioConfig, run: RunFacts) -> None:
        """Start or continue the run, whose name must be unique: Trackio finds it by that."""
        self._options, self._name = options, f"{run.name}-{run.id}"
        self._run = trackio.init(
            project=options.project,
            name=self._name,
            space_id=options.space_id,
            resume="allow",
            config={**run.config, "facts": dict(run.facts)},
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def known_points(self, since: int) -> set[tuple[int, str]] | None:
        """Return what the database has; a Space is not asked."""
        if self._options.space_id is not None:
            return None
        points: set[tuple[int, str]] = set()
        for row in self._rows():
            if row["step"] >= since:
                points.update((row["step"], name) for name in row)
        return points

    def log(self, points: Sequence[Point]) -> None:
        """Add a row for each point.

        Raises:
            TimeoutError: the database did not take them, which Trackio itself only warns of.
        """
        rows: list[tuple[int, dict[str, object]]] = []
        for point in points:
            rows.append((point.global_step, {"stage": point.stage, **point.values}))
        self._add(rows)

    def show(self, global_step: int, pictures: Sequence[Picture]) -> None:
        """Add the images with their boxes drawn on them. Raises as `log`."""
        images: dict[str, object] = {}
        for index, picture in enumerate(pictures):
            images[f"rollouts/{index}"] = trackio.Image(draw_boxes(picture), caption=picture.text)
        self._add([(global_step, images)])

    def finish(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        """Add the summary, and end the run."""
        known = self._rows()
        last_step = max((row["step"] for row in known), default=0)
        self._run.log({"run/status": status, **summary}, step=last_step)
        self._run.finish()

    def _add(self, rows: Sequence[tuple[int, dict[str, object]]]) -> None:
        """Log rows, and wait until the database has them; a thread of Trackio's writes them."""
        num_before = len(self._rows())
        for step, row in rows:
            self._run.log(row, step=step)
        if self._options.space_id is not None:
            return
        until = time.monotonic() + _MAX_WAIT_S
        while len(self._rows()) < num_before + len(rows):
            if time.monotonic() > until:
                raise TimeoutError(f"its database took no rows within {_MAX_WAIT_S:.0f} s")
            time.sleep(0.1)

    def _rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = SQLiteStorage.get_logs(self._options.project, self._name)
        return rows
