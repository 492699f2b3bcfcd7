"""Sends a run's metrics to one tracker, over kills and resumes.

RUN/trackers/NAME.json has a mark: the last global step that the tracker took, and which of its metrics. It is written
after the tracker took them, and a resumed run's repeated steps up to it are left out. What a kill between the two
leaves beyond the mark is asked of the tracker.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from PIL import Image, ImageDraw

from mmrl.config import Config, flatten_settings
from mmrl.config.secrets import mask_secret
from mmrl.log.logger import read_records
from mmrl.log.marks import record_marks
from mmrl.log.rollout_records import parse_medium
from mmrl.log.run_dir import RunDir
from mmrl.media.image import open_shown_image
from mmrl.trackers.backends import TRACKERS, Picture, Points, Row, RunFacts, Tracker
from mmrl.types import ImageRef, MediaError
from mmrl.utils.files import write_atomically

_BATCH_ROWS: Final = 100  # rows that are sent between two writes of the mark
_PICTURES: Final = "pictures"  # the name of a step's pictures among its metrics
_GROUPS_SHOWN: Final = 4
_MAX_SIDE_PX: Final = 512
_MAX_TEXT_CHARS: Final = 2000  # of a question or response
_GOLD, _PREDICTED = (0, 158, 115), (230, 97, 0)  # colours that people with any colour vision tell apart


class RunReader:
    """Reads metrics.jsonl and timings.jsonl while a run writes them."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir, self._ends = run_dir, dict[Path, int]()  # bytes that were read of each file
        self._first_steps: dict[str, int] = {}  # global step at which each stage began, in the order of the stages
        self._last_step = 0  # global step of the last line of metrics.jsonl

    def read_new(self) -> list[Row]:
        """Return what was appended since the last call, a row for each step."""
        # First, so that the metrics of these steps are in their file by now. A step that a killed run repeats has
        # several lines, of which the last counts.
        times = {(record["stage"], record["step"]): record for record in self._read(self._run_dir.timings)}
        rows: dict[int, Row] = {}
        for record in self._read(self._run_dir.metrics):
            stage, step = record["stage"], record["step"]
            if stage is not None:  # as it is after the last one
                self._last_step = max(self._last_step, self._first_steps.setdefault(stage, self._last_step) + step)
                record |= {"stage/index": list(self._first_steps).index(stage) + 1, "stage/step": step}
            row = self._add(rows, self._last_step, record)
            rollouts = self._run_dir.rollouts / f"{stage}-{step:06d}.jsonl"
            row.rollouts = rollouts if rollouts.exists() else row.rollouts
        for (stage, step), record in times.items():
            global_step = self._first_steps.get(stage, math.inf) + step
            # A killed run has times of steps that the resumed one has yet to repeat.
            if global_step <= self._last_step:
                self._add(rows, int(global_step), record)
        return [rows[step] for step in sorted(rows)]

    def _read(self, path: Path) -> Iterator[dict[str, Any]]:
        if path.exists():
            for record, end in read_records(path, self._ends.get(path, 0)):
                self._ends[path] = end
                yield record

    @staticmethod
    def _add(rows: dict[int, Row], step: int, record: Mapping[str, Any]) -> Row:
        row = rows.setdefault(step, Row(step=step, values={}))
        for name, value in record.items():
            if name not in ("stage", "step") and isinstance(value, int | float) and math.isfinite(value):
                row.values.setdefault(name, float(value))
        return row


@dataclass(slots=True)
class Mark:
    """How far a tracker is, as RUN/trackers/NAME.json has it."""

    id: str  # of the run in the tracker
    step: int = 0  # last global step that was sent
    sent: Points = field(default_factory=set)  # what was sent from `step` on

    @classmethod
    def read(cls, path: Path) -> Mark:
        """Read the file; a new run in the tracker begins without one."""
        if not path.exists():
            return cls(uuid.uuid4().hex[:8])
        record = json.loads(path.read_text(encoding="utf-8"))
        return cls(record["id"], record["step"], {(record["step"], name) for name in record["sent"]})

    def write(self, path: Path) -> None:
        """Replace the file, in a folder that exists."""
        sent = sorted(name for step, name in self.sent if step == self.step)
        record = {"id": self.id, "step": self.step, "sent": sent}
        write_atomically(path, json.dumps(record, indent=1) + "\n")

    def select_unsent(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that have values which were not sent, with these alone."""
        unsent = []
        for row in rows:
            values = {name: value for name, value in row.values.items() if (row.step, name) not in self.sent}
            if values and row.step >= self.step:
                unsent.append(replace(row, values=values))
        return unsent

    def move_past(self, rows: Sequence[Row]) -> None:
        """Move the mark behind rows that were sent."""
        self.step = rows[-1].step
        for row in rows:
            self.sent.update((row.step, name) for name in (*row.values, _PICTURES))
        self.sent = {point for point in self.sent if point[0] >= self.step}


class Follower:
    """Follows one run for one tracker."""

    def __init__(self, run_dir: RunDir, config: Config, base_dir: Path, name: str) -> None:
        """Follow the run of `config`, whose relative files start from `base_dir`; nothing is read or sent yet."""
        self._run_dir, self._config, self._base_dir = run_dir, config, base_dir
        self._name, self._path = name, run_dir.trackers / f"{name}.json"
        self._tracker: Tracker | None = None

    def send_new(self) -> Tracker:
        """Send what the tracker lacks, and return it; raises whatever it raises. The next call starts from the mark."""
        tracker = self._tracker or self._open()
        # Should this fail, the tracker may have taken a part: the next call opens it anew and asks what it has.
        self._tracker = None
        rows = self._mark.select_unsent(self._reader.read_new())
        for start in range(0, len(rows), _BATCH_ROWS):
            batch = rows[start : start + _BATCH_ROWS]
            for row in batch:
                if row.rollouts is not None and (row.step, _PICTURES) not in self._mark.sent:
                    pictures = read_pictures(row.rollouts, self._run_dir, self._config, self._base_dir)
                    tracker.log_pictures(row.step, pictures)
            tracker.log(batch)
            self._mark.move_past(batch)
            self._mark.write(self._path)
        self._tracker = tracker
        return tracker

    def finish(self, status: str) -> None:
        """Send what is left and the summary, and end the run in the tracker."""
        values = _read_flat(self._run_dir.summary) if status == "finished" else {}
        summary = {f"summary/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        self.send_new().end(status, summary)

    def _open(self) -> Tracker:
        """Open the tracker, and start reading from the first line."""
        self._reader, self._mark = RunReader(self._run_dir), Mark.read(self._path)
        # The id is on disk before the tracker has it: a kill in between would leave a run that nobody continues.
        self._mark.write(self._path)
        settings = flatten_settings(self._config.model_dump(mode="json"))
        for key, value in _read_flat(self._run_dir.manifest).items():
            if not key.startswith("data"):
                settings[f"manifest.{key}"] = value
        texts = {key: str(mask_secret(key, value)) for key, value in settings.items()}
        name, project, folder = self._config.run.name, self._config.logging.project, self._run_dir.path.resolve()
        tracker = TRACKERS[self._name](
            RunFacts(id=self._mark.id, name=name, project=project, folder=folder, config=texts)
        )
        self._mark.sent = tracker.begin(self._mark.step, self._mark.sent)
        return tracker


def count_unsent(run_dir: RunDir, name: str) -> int:
    """Return of how many steps a tracker lacks metrics."""
    return len(Mark.read(run_dir.trackers / f"{name}.json").select_unsent(RunReader(run_dir).read_new()))


def _read_flat(path: Path) -> dict[str, Any]:
    """Return the values of a JSON file by dotted path; none if there is no file."""
    return flatten_settings(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def read_pictures(path: Path, run_dir: RunDir, config: Config, base_dir: Path) -> list[Picture]:
    """Return pictures of the first rollouts of the first groups in a file. Those about no still image are left out.

    Images may lie in the run directory and where those of the config may; its folders start from `base_dir`.
    """
    roots = [run_dir.path.resolve(), *((base_dir / root).resolve() for root in config.data.media_roots)]
    first_rollouts: dict[int, dict[str, Any]] = {}
    for record, _ in read_records(path):
        if record["group"] < _GROUPS_SHOWN:
            first_rollouts.setdefault(record["group"], record)
    pictures = []
    for record in first_rollouts.values():
        index = record["media_index"] or 0
        for medium in record["media"][index : index + 1]:
            ref = parse_medium(medium, roots[0])
            if not isinstance(ref, ImageRef) or ref.timestamp is not None:
                continue
            try:
                image = open_shown_image(ref, roots, config.data.media_limits)
            except MediaError:  # it was moved or changed since
                continue
            image.thumbnail((_MAX_SIDE_PX, _MAX_SIDE_PX))
            _draw_boxes(image, record)
            pictures.append(Picture(image, _describe(record)))
    return pictures


def _draw_boxes(image: Image.Image, record: Mapping[str, Any]) -> None:
    """Draw the target's boxes green and thick, and the answer's orange."""
    draw = ImageDraw.Draw(image)
    for key, color, width in (("target", _GOLD, 3), ("answer", _PREDICTED, 2)):
        for mark in record_marks(record, key):
            if mark["shape"] == "box":
                left, top, right, bottom = mark["at"]
                # A predicted box may have its corners in any order.
                xs = sorted((left * image.width, right * image.width))
                ys = sorted((top * image.height, bottom * image.height))
                draw.rectangle((xs[0], ys[0], xs[1], ys[1]), outline=color, width=width)


def _describe(record: Mapping[str, Any]) -> str:
    lines = [f"{record['stage']} step {record['step']}, sample {record['sample']}", f"reward: {record.get('total')}"]
    lines += [f"{key}: {str(record[key])[:_MAX_TEXT_CHARS]}" for key in ("question", "target", "response")]
    return "\n".join(lines)
