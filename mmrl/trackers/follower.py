"""Sends a run's lines to one tracker exactly once, over kills and resumes.

RUN/trackers/KIND.json has a mark: the last step that the tracker took. It is written after the tracker took points, and
the process may be killed between the two, so the next process asks the tracker which points beyond the mark it has. A
resumed run cuts metrics.jsonl back and writes the same values again; lines up to the mark are left out.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from mmrl.config import Config, flatten_settings
from mmrl.config.schema.trackers import AnyTracker
from mmrl.log.run_dir import RunDir
from mmrl.trackers.kinds import open_tracker
from mmrl.trackers.pictures import PictureReader
from mmrl.trackers.run_lines import RunLines
from mmrl.trackers.tracker import Point, RunFacts, RunStatus, Tracker
from mmrl.utils.files import report_write_errors, write_atomically

_BATCH_POINTS: Final = 100  # points that are sent between two writes of the mark
_PASSWORD: Final = re.compile(r"(?<=://)[^/@\s]+@")  # user and password in a URL


@dataclass(slots=True)
class Mark:
    """How far one of the two files was sent."""

    step: int = 0  # global step of the last point that was sent
    sent: set[tuple[int, str]] = field(default_factory=set)  # (global step, metric) that were sent from `step` on

    def pass_over(self, points: Sequence[Point]) -> list[Point]:
        """Move the mark past points, and return those of them that have values which were not sent yet."""
        new = []
        for point in points:
            values = {}
            for name, value in point.values.items():
                if point.global_step >= self.step and (point.global_step, name) not in self.sent:
                    values[name] = value
            # Two lines of one step, its own and that of a validation, may be among the points.
            self.sent.update((point.global_step, name) for name in values)
            if values:
                new.append(replace(point, values=values))
        self.step = max([self.step, *(point.global_step for point in new)])
        self.sent = {key for key in self.sent if key[0] >= self.step}
        return new


@dataclass(slots=True)
class Progress:
    """How far a tracker is, as RUN/trackers/KIND.json has it."""

    id: str  # of the run in the tracker
    marks: dict[str, Mark]  # by file: `metrics` and `timings`
    pictures: dict[str, int]  # global step of each file of rollouts whose pictures were sent, by its name

    @classmethod
    def read(cls, path: Path) -> Progress:
        """Read the file; a new run in the tracker begins without one."""
        if not path.exists():
            return cls(uuid.uuid4().hex[:8], {"metrics": Mark(), "timings": Mark()}, {})
        record = json.loads(path.read_text(encoding="utf-8"))
        marks = {}
        for file, mark in record["marks"].items():
            marks[file] = Mark(mark["step"], {(mark["step"], name) for name in mark["sent"]})
        return cls(record["id"], marks, record["pictures"])

    def write(self, path: Path) -> None:
        """Replace the file.

        Raises:
            UserError: it cannot be written.
        """
        marks = {}
        for file, mark in self.marks.items():
            names = sorted(name for step, name in mark.sent if step == mark.step)
            marks[file] = {"step": mark.step, "sent": names}
        record = {"id": self.id, "marks": marks, "pictures": self.pictures}
        write_atomically(path, json.dumps(record, indent=1) + "\n")


class Follower:
    """Follows one run for one tracker."""

    def __init__(
        self,
        run_dir: RunDir,
        config: Config,
        base_dir: Path,
        options: AnyTracker,
        *,
        open_tracker: Callable[[AnyTracker, RunFacts], Tracker] = open_tracker,
    ) -> None:
        """Follow the run of `config`, whose relative files start from `base_dir`; nothing is read or sent yet."""
        self._run_dir = run_dir
        self._config, self._options, self._open_tracker = config, options, open_tracker
        self._path = progress_path(run_dir, options.kind)
        self._picture_reader = PictureReader(config, base_dir, run_dir)
        self._tracker: Tracker | None = None
        self._lines = RunLines(run_dir)
        self._progress = Progress.read(self._path)

    def send_new(self) -> None:
        """Send the lines and pictures that the tracker lacks. After an error the next call starts from the mark.

        Raises what the tracker raises, and UserError if the progress cannot be written.
        """
        tracker = self._tracker or self._open()
        # Should this fail, the tracker may have taken a part: the next call opens it anew and asks what it has.
        self._tracker = None
        metrics, timings = self._lines.read_new()
        self._send(tracker, "metrics", metrics)
        self._send(tracker, "timings", timings)
        for file, step, pictures in self._picture_reader.read_new(self._progress.pictures, self._lines):
            if pictures:
                tracker.show(step, pictures)
            self._progress.pictures[file] = step
            self._progress.write(self._path)
        self._tracker = tracker

    def finish(self, status: RunStatus) -> None:
        """Send what is left and the summary, and end the run in the tracker. Raises as `send_new`."""
        self.send_new()
        summary: dict[str, float] = {}
        if status == "finished" and self._run_dir.summary.exists():
            for name, value in flatten_settings(json.loads(self._run_dir.summary.read_text("utf-8"))).items():
                if isinstance(value, int | float):
                    summary[f"summary/{name}"] = value
        if self._tracker is not None:
            self._tracker.finish(status, summary)

    def _open(self) -> Tracker:
        """Open the tracker, and start reading from the first line."""
        with report_write_errors(self._path):
            self._path.parent.mkdir(exist_ok=True)
        self._lines, self._progress = RunLines(self._run_dir), Progress.read(self._path)
        # The id is on disk before the tracker has it: a kill in between would leave a run that nobody continues.
        self._progress.write(self._path)
        tracker = self._open_tracker(self._options, self._describe_run())
        marks = self._progress.marks.values()
        since = min(mark.step for mark in marks)
        known = tracker.known_points(since)
        for mark in marks:
            if known is not None:
                mark.step, mark.sent = since, set(known)
        if tracker.rewinds:
            kept = {file: step for file, step in self._progress.pictures.items() if step < since}
            self._progress.pictures = kept
        return tracker

    def _send(self, tracker: Tracker, file: str, points: Sequence[Point]) -> None:
        mark = self._progress.marks[file]
        for start in range(0, len(points), _BATCH_POINTS):
            new = mark.pass_over(points[start : start + _BATCH_POINTS])
            if new:
                tracker.log(new)
                self._progress.write(self._path)

    def _describe_run(self) -> RunFacts:
        settings: dict[str, object] = {}
        for key, value in flatten_settings(self._config.model_dump(mode="json")).items():
            settings[key] = _PASSWORD.sub("***@", value) if isinstance(value, str) else value
        facts: Mapping[str, Any] = {}
        if self._run_dir.manifest.exists():
            facts = flatten_settings(json.loads(self._run_dir.manifest.read_text("utf-8")))
        return RunFacts(
            id=self._progress.id,
            name=getattr(self._options, "name", None) or self._config.run.name,
            folder=self._run_dir.path.resolve(),
            config=settings,
            facts={key: str(value) for key, value in facts.items() if not key.startswith("data")},
        )


def progress_path(run_dir: RunDir, kind: str) -> Path:
    """Return the file that keeps how far a tracker is."""
    return run_dir.trackers / f"{kind}.json"


def count_unsent(run_dir: RunDir, kind: str) -> int:
    """Return how many lines of metrics.jsonl a tracker has not taken."""
    mark = Progress.read(progress_path(run_dir, kind)).marks["metrics"]
    metrics, _ = RunLines(run_dir).read_new()
    return len(mark.pass_over(metrics))
