"""Starts, runs and ends the process of a tracker: `python -m mmrl.log.trackers.process RUN NAME BASE_DIR`.

A tracker's library has threads, exit handlers and a server that may not answer; in a separate process it can delay
neither a step nor the run's end. Standard input receives the run's status when it ends, and nothing when it is killed.
Standard output has lines for the user; what libraries print goes to RUN/trackers/NAME.log.

RUN/trackers/NAME.json holds the mark: the last global step that was sent, and which of its metrics. It is written after
each batch was sent. A resumed run repeats steps; those up to the mark are not sent again. After a kill between sending
a batch and writing the mark, the tracker is queried for what it has.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import IO, Any, Final, NoReturn

from PIL import Image, ImageDraw

from mmrl.config import Config, flatten_settings, load_config
from mmrl.config.secrets import mask_secret
from mmrl.log.console import Console
from mmrl.log.logger import GlobalSteps, RunState, read_records, report_end
from mmrl.log.rollout_records import parse_medium, record_marks
from mmrl.log.run_dir import RunDir
from mmrl.log.trackers.backends import TRACKERS, Picture, Points, RunFacts, StepRow, Tracker
from mmrl.media.image import open_shown_image
from mmrl.types import ImageRef, MediaError
from mmrl.utils.files import write_atomically
from mmrl.utils.processes import die_with_parent, kill_processes

_BATCH_ROWS: Final = 100  # rows that are sent between two writes of the mark
_PICTURES: Final = "pictures"  # the name of a step's pictures among its metrics
_GROUPS_SHOWN: Final = 4
_MAX_SIDE_PX: Final = 512
_MAX_TEXT_CHARS: Final = 2000  # of a question or response
_GOLD, _PREDICTED = (0, 158, 115), (230, 97, 0)  # colours that people with any colour vision tell apart
_POLL_S: Final = 1.0
_FIRST_RETRY_S, _MAX_RETRY_S = 10.0, 600.0
# Seconds that trackers have to send what is left; a run that was stopped can send it when it resumes.
_DRAIN_S: Final = {"finished": 30.0, "stopped": 10.0, "failed": 10.0}
Started = tuple[str, subprocess.Popen[str], Thread]


@contextmanager
def follow_run(config: Config, base_dir: Path, run_dir: RunDir, console: Console) -> Iterator[None]:
    """Let the trackers of a config follow the run inside this block. A tracker's failure never ends the run."""
    started = [start_tracker(name, base_dir, run_dir, console) for name in config.logging.trackers]
    with report_end(partial(_end, started, run_dir, console)):
        yield


def start_tracker(name: str, base_dir: Path, run_dir: RunDir, console: Console) -> Started:
    """Start the process of a tracker, and a thread that prints its lines."""
    command = [sys.executable, "-m", "mmrl.log.trackers.process", str(run_dir.path), name, str(base_dir)]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    # In a separate session: Ctrl-C in a terminal is for the run, which then ends this process.
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True, start_new_session=True)

    def print_lines() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            console.warn(f"tracker {name} {line.rstrip()} (details: {run_dir.trackers / name}.log)")

    printer = Thread(target=print_lines, daemon=True, name=f"tracker {name}")
    printer.start()
    return name, process, printer


def _end(started: Sequence[Started], run_dir: RunDir, console: Console, status: RunState) -> None:
    """Let the trackers send what is left, and warn of what they have not sent."""
    until = time.monotonic() + _DRAIN_S[status]
    try:
        for _, process, _ in started:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it is dead already
                process.stdin.write(status + "\n")
                process.stdin.flush()
        for name, process, _ in started:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                console.warn(f"tracker {name} was still busy {_DRAIN_S[status]:.0f} s after the run and was ended")
    finally:
        # Also after Ctrl-C: nobody has to wait for a tracker.
        for _, process, printer in started:
            if process.poll() is None:
                kill_processes([process.pid])
                process.wait()
            printer.join(1.0)
    for name, _, _ in started:
        unsent = count_unsent(run_dir, name)
        if unsent:
            command = f"echo {status} | python -m mmrl.log.trackers.process {run_dir.path} {name} ."
            console.warn(f"tracker {name} lacks the metrics of {unsent:,} steps; `{command}` sends them")


def follow(follower: Follower, run_end: IO[str], report: Callable[[str], None]) -> None:
    """Send what is new every second until `run_end` has the run's status or is closed. Report the first failure."""
    pause_s, has_reported, status = _POLL_S, False, ""
    while not status:
        if select.select([run_end], [], [], pause_s)[0]:
            status = run_end.readline().strip()
            if not status:
                return
        try:
            if status:
                follower.finish(status)
            else:
                follower.send_new()
            pause_s = _POLL_S
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises must not end the run
            traceback.print_exc()
            pause_s = min(max(_FIRST_RETRY_S, 2 * pause_s), _MAX_RETRY_S)
            if not has_reported:
                has_reported = True
                report(f"failed: {_describe(error)}; the run continues, and the tracker is tried again until its end")


class RunReader:
    """Reads metrics.jsonl and timings.jsonl while a run writes them."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._ends: dict[Path, int] = {}  # bytes that were read of each file
        self._global_steps = GlobalSteps()

    def read_new(self) -> list[StepRow]:
        """Return what was appended since the last call, a row for each step."""
        # A run appends a step's metrics, then its timings. A step that a killed run repeats has several lines, of which
        # the last counts.
        timings = self._run_dir.timings
        old_timings_end = timings.stat().st_size if timings.exists() else 0
        rows: dict[int, StepRow] = {}
        for record, end in self._read(self._run_dir.metrics):
            self._ends[self._run_dir.metrics] = end
            stage, step = record["stage"], record["step"]
            global_step = self._global_steps.count(stage, step)
            if stage is not None:  # None between stages and after the last one
                stage_index = list(self._global_steps.first_steps).index(stage) + 1
                record |= {"stage/index": stage_index, "stage/step": step}
            row = self._add(rows, global_step, record)
            rollouts = self._run_dir.rollouts / f"{stage}-{step:06d}.jsonl"
            row.rollouts = rollouts if rollouts.exists() else row.rollouts
        times: dict[int, dict[str, Any]] = {}
        for record, end in self._read(timings):
            timed_step = self._global_steps.first_steps.get(record["stage"], math.inf) + record["step"]
            if timed_step <= self._global_steps.last:
                times[int(timed_step)] = record
            elif end > old_timings_end:
                # Its metrics were written after metrics.jsonl was read: the next call reads both. An older line
                # without metrics comes from a killed run, whose step has yet to be repeated.
                break
            self._ends[timings] = end
        for step, record in times.items():
            self._add(rows, step, record)
        return [rows[step] for step in sorted(rows)]

    def _read(self, path: Path) -> Iterator[tuple[dict[str, Any], int]]:
        return read_records(path, self._ends.get(path, 0)) if path.exists() else iter(())

    @staticmethod
    def _add(rows: dict[int, StepRow], step: int, record: Mapping[str, Any]) -> StepRow:
        row = rows.setdefault(step, StepRow(step=step, values={}))
        for name, value in record.items():
            if name not in ("stage", "step") and isinstance(value, int | float) and math.isfinite(value):
                row.values.setdefault(name, float(value))
        return row


@dataclass(slots=True)
class Mark:
    """The place up to which a tracker has received the run; RUN/trackers/NAME.json holds it."""

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

    def select_unsent(self, rows: Sequence[StepRow]) -> list[StepRow]:
        """Return the rows that have unsent values, with only these values."""
        unsent = []
        for row in rows:
            values = {name: value for name, value in row.values.items() if (row.step, name) not in self.sent}
            if values and row.step >= self.step:
                unsent.append(replace(row, values=values))
        return unsent

    def move_past(self, rows: Sequence[StepRow]) -> None:
        """Move the mark past rows that were sent."""
        self.step = rows[-1].step
        for row in rows:
            self.sent.update((row.step, name) for name in (*row.values, _PICTURES))
        self.sent = {point for point in self.sent if point[0] >= self.step}


class Follower:
    """Follows one run for one tracker."""

    def __init__(self, run_dir: RunDir, config: Config, base_dir: Path, name: str) -> None:
        """Follow the run of `config`, whose relative files start from `base_dir`; nothing is read or sent yet."""
        self._run_dir, self._config, self._base_dir = run_dir, config, base_dir
        self._name = name
        self._path = run_dir.trackers / f"{name}.json"  # the mark
        self._tracker: Tracker | None = None

    def send_new(self) -> Tracker:
        """Send what the tracker lacks, and return the tracker. Its errors are raised; the next call then reopens it."""
        tracker = self._tracker or self._open()
        # If this fails, the tracker may have received a part: the next call opens it again and asks what it has.
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
        facts = RunFacts(
            id=self._mark.id,
            name=self._config.run.name,
            project=self._config.logging.project,
            folder=self._run_dir.path.resolve(),
            config=texts,
        )
        tracker = TRACKERS[self._name](facts)
        self._mark.sent = tracker.begin(self._mark.step, self._mark.sent)
        return tracker


def count_unsent(run_dir: RunDir, name: str) -> int:
    """Return the number of steps of which a tracker lacks metrics."""
    return len(Mark.read(run_dir.trackers / f"{name}.json").select_unsent(RunReader(run_dir).read_new()))


def _read_flat(path: Path) -> dict[str, Any]:
    """Return the values of a JSON file by dotted path; none if there is no file."""
    return flatten_settings(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def read_pictures(path: Path, run_dir: RunDir, config: Config, base_dir: Path) -> list[Picture]:
    """Return a picture of the first rollout of each of the first groups in a file; those without an image are left out.

    Images may lie in the run directory or in `data.media_roots`, whose relative folders start from `base_dir`.
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
            pictures.append(Picture(image, _describe_rollout(record)))
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


def _describe_rollout(record: Mapping[str, Any]) -> str:
    lines = [f"{record['stage']} step {record['step']}, sample {record['sample']}", f"reward: {record.get('total')}"]
    lines += [f"{key}: {str(record[key])[:_MAX_TEXT_CHARS]}" for key in ("question", "target", "response")]
    return "\n".join(lines)


def main(run: str, name: str, base_dir: str) -> NoReturn:
    """Follow a run until it ends."""
    # What a killed run leaves unsent is sent when it resumes.
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run_dir = RunDir(Path(run))
    to_user = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    report = partial(print, file=to_user, flush=True)
    try:
        run_dir.trackers.mkdir(exist_ok=True)
        log = os.open(run_dir.trackers / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        follow(Follower(run_dir, load_config(run_dir.config).config, Path(base_dir), name), sys.stdin, report)
    except Exception as error:  # noqa: BLE001 - the user is told
        traceback.print_exc()
        report(f"does not follow this run: {_describe(error)}")
    # Not `sys.exit`: handlers of libraries could wait for a server for as long as they like.
    sys.stdout.flush()
    os._exit(0)


def _describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


if __name__ == "__main__":
    main(*sys.argv[1:])
