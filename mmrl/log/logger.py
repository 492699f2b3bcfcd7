"""The log of a run: metrics, timings and events as JSON lines, records of rollouts, and a line on the console.

metrics.jsonl, events.jsonl and the records hold only values that follow from the config and its seed, so a run that was
killed and resumed ends with the same bytes as one that was not. Wall-clock values go to timings.jsonl, where a repeated
step appears twice, and to status.json.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from mmrl.log.console import Console, repeat_in_thread
from mmrl.log.rollout_records import RolloutRecord, TextSource, write_records
from mmrl.log.run_dir import RunDir
from mmrl.types import RunInterrupted, TokenValues, TrainingState, UserError
from mmrl.utils.files import check_not_deleted, json_line, report_write_errors, write_atomically

_MAX_LINE_BYTES: Final = 1 << 20
HEARTBEAT_S: Final = 5.0
"""Seconds after which status.json is written again."""
RunState = Literal["running", "finished", "stopped", "failed"]


class RunLogger:
    """The logger of rank 0, for a claimed run directory."""

    def __init__(self, run_dir: RunDir, console: Console, texts: TextSource) -> None:
        self.console = console
        self.metrics = MetricsFile(run_dir.metrics)
        self.status = StatusFile(run_dir.status)
        self._run_dir, self._texts = run_dir, texts
        self._timings, self._events = MetricsFile(run_dir.timings), MetricsFile(run_dir.events)
        self._stage = ""
        self._last_values: dict[str, float] = {}

    def resume_from(self, state: TrainingState) -> None:
        """Cut the files to where the run was at `state`, and read the last value of each metric.

        Raises:
            UserError: no line of metrics.jsonl ends at `state.metrics_bytes`.
        """
        self.metrics.truncate(state.metrics_bytes)
        position = 0
        for event, end in read_records(self._run_dir.events):
            if event["version"] <= state.version:
                position = end
        self._events.truncate(position)
        # `checkpoints.best` may name a metric that was last recorded before the run was resumed.
        for record, _ in read_records(self._run_dir.metrics):
            for name, value in record.items():
                if isinstance(value, int | float):
                    self._last_values[name] = float(value)

    def step_metrics(self, stage: str) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the steps of a stage that are in metrics.jsonl, with their metrics; null is NaN."""
        for record, _ in read_records(self._run_dir.metrics):
            # Validations and benchmarks have separate lines.
            if record["stage"] != stage or "learner/lr" not in record:
                continue
            metrics = {}
            for name, value in record.items():
                if name not in ("stage", "step"):
                    metrics[name] = math.nan if value is None else value
            yield record["step"], metrics

    @contextmanager
    def log_stage(self, name: str, steps: int, done: int = 0) -> Iterator[None]:
        """Label everything inside this block with a stage of `steps` steps, of which `done` are finished."""
        self._stage = name
        self.console.start_stage(name, steps, done)
        self.status.update(stage=name, step=done, steps=steps)
        try:
            yield
        finally:
            self.console.end_stage()
            self._stage = ""

    def write_rollouts(
        self,
        state: TrainingState,
        name: str,
        records: Sequence[RolloutRecord],
        *,
        version: int,
        token_values: Mapping[int, TokenValues] | None = None,
    ) -> Path:
        """Write rollouts/`name`.jsonl by `write_records`; return the file.

        `version` is that of the policy which the step trained from; in an evaluation, of the policy that answered.
        """
        path = self._run_dir.rollouts / f"{name}.jsonl"
        step_keys = {"stage": self._stage or None, "step": state.step, "version": version}
        write_records(path, records, step_keys, self._texts, token_values)
        return path

    def log_event(self, state: TrainingState, name: str, message: str | None) -> None:
        """Write to events.jsonl that a problem began, with its message, or ended, without one."""
        event = {"stage": self._stage, "step": state.step, "version": state.version, "event": "health", "name": name}
        phase = {"state": "end"} if message is None else {"state": "begin", "message": message}
        self._events.append({**event, **phase})

    def log(self, state: TrainingState, metrics: Mapping[str, float], times: Mapping[str, float]) -> None:
        """Record one step and show it on the console."""
        self.log_metrics(state, metrics)
        self._timings.append({"stage": self._stage, "step": state.step, **times})
        self.console.show_step(state.step, metrics, times)
        self.status.update(step=state.step)

    def log_progress(self, step: int) -> None:
        """Show the end of a step that has no metrics."""
        self.console.show_step(step, {}, {})
        self.status.update(step=step)

    def log_metrics(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Write values only to metrics.jsonl, such as results of an evaluation. Between stages `stage` is null."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._last_values[name] = float(value)
        self.metrics.append({"stage": self._stage or None, "step": state.step, **dict(sorted(metrics.items()))})

    def last_value(self, name: str) -> float | None:
        """Return the last finite value of a metric, or None if it was never recorded."""
        return self._last_values.get(name)

    def close(self) -> None:
        """Close the files of this logger."""
        for file in (self.metrics, self._timings, self._events):
            file.close()


class NullLogger:
    """The logger of all ranks but 0. It writes nothing, because rank 0 logs for the whole run."""

    def _ignore(self, *_: object, **__: object) -> None:
        pass

    resume_from = log = write_rollouts = log_event = log_progress = log_metrics = _ignore
    last_value = sync = close = _ignore

    def step_metrics(self, stage: str) -> Iterator[tuple[int, dict[str, float]]]:
        """Return no steps: only rank 0 reads them."""
        return iter(())

    def _enter_nothing(self, *_: object) -> AbstractContextManager[None]:
        return nullcontext()

    log_stage = report = _enter_nothing

    @property
    def metrics(self) -> NullLogger:
        """Return this logger, which has the methods of the metrics file."""
        return self

    status = metrics

    def position(self) -> int:
        """Return the size of a file to which nothing was written."""
        return 0


MetricsLogger = RunLogger | NullLogger
"""The logger of any rank."""


@contextmanager
def report_end(report: Callable[[RunState], None]) -> Iterator[None]:
    """Call `report` at the end of this block with the outcome of the run inside it."""
    state: RunState = "failed"
    try:
        yield
        state = "finished"
    except (RunInterrupted, KeyboardInterrupt):
        state = "stopped"
        raise
    finally:
        report(state)


class StatusFile:
    """status.json of a run: its stage and step, and a time stamp that shows whether the run is still alive."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fields: dict[str, Any] = {"stage": None, "step": 0, "steps": 0}

    @contextmanager
    def report(self) -> Iterator[None]:
        """Rewrite the file every few seconds from a thread while this block runs; at its end, write the outcome."""
        self._write("running")
        renew = partial(self._write, "running")
        with report_end(self._write), repeat_in_thread(renew, HEARTBEAT_S, HEARTBEAT_S):
            yield

    def update(self, **fields: str | int) -> None:
        """Change fields of the file. The thread writes them: a step never waits for the disk."""
        self._fields = {**self._fields, **fields}

    def _write(self, state: RunState) -> None:
        status = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "state": state,
            **self._fields,
            "updated": datetime.now(UTC).isoformat(timespec="seconds"),
            "heartbeat_s": HEARTBEAT_S,
        }
        # A run on a full disk fails with a message when it writes a file that it needs; it does not need this one.
        with suppress(UserError):
            write_atomically(self._path, json.dumps(status) + "\n")


class MetricsFile:
    """A file to which one JSON object a line is appended. A value that is not finite is written as null."""

    def __init__(self, path: Path) -> None:
        """Open the file, and cut off a last line that a killed run left incomplete."""
        self._path = path
        with report_write_errors(path):
            # Unbuffered: a killed run loses nothing that `append` has returned from.
            self._file = path.open("a+b", buffering=0)
            size = self.position()
            # No line is longer than this, so the last line break lies in the piece that is read.
            start = max(0, size - _MAX_LINE_BYTES)
            self._file.seek(start)
            self._file.truncate(start + self._file.read(size - start).rfind(b"\n") + 1)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line, with the keys in the order given.

        Raises:
            UserError: the disk is full or the file cannot be written.
        """
        remaining = memoryview(json_line(record).encode("utf-8", errors="backslashreplace"))
        # Writing to an open file succeeds silently even after the file was deleted.
        check_not_deleted(self._path)
        with report_write_errors(self._path):
            # An unbuffered write may take only a part of the bytes.
            while remaining:
                remaining = remaining[self._file.write(remaining) :]

    def position(self) -> int:
        """Return the size of the file in bytes; a checkpoint records it."""
        return self._file.seek(0, os.SEEK_END)

    def sync(self) -> None:
        """Wait until everything written is on disk. A checkpoint records the position, so it is written after this."""
        with report_write_errors(self._path):
            os.fsync(self._file.fileno())

    def truncate(self, position: int) -> None:
        """Delete everything after byte `position`, where a resumed run continues.

        Raises:
            UserError: no line of the file ends there.
        """
        size = self.position()
        self._file.seek(max(0, position - 1))
        if position > size or (position and self._file.read(1) != b"\n"):
            raise UserError(
                f"{self._path} was changed since the checkpoint: no line ends at byte {position} of {size}; "
                "restore the file, or choose another run directory"
            )
        with report_write_errors(self._path):
            self._file.truncate(position)

    def close(self) -> None:
        """Close the file; nothing can be appended then."""
        self._file.close()


def read_records(path: Path, start: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the complete records of a file of JSON lines from byte `start` on, with the byte at which each ends."""
    with path.open("rb") as file:
        end = file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):  # it is being written
                return
            end += len(line)
            yield json.loads(line), end


class GlobalSteps:
    """Counts the steps of a run over all its stages, from the lines of metrics.jsonl in their order."""

    def __init__(self) -> None:
        self.first_steps: dict[str, int] = {}  # global step of each stage's step 0, in the order of the stages
        self.last = 0  # largest global step so far

    def count(self, stage: str | None, step: int) -> int:
        """Return the global step of a line. A line between stages, whose `stage` is None, has that of the line before.

        A measurement before the first step of a later stage would have the step of the earlier stage's last one, which
        may have the same metrics, so it gets a step of its own.
        """
        if stage is not None:
            if stage not in self.first_steps:
                self.first_steps[stage] = self.last + (step == 0 and len(self.first_steps) > 0)
            self.last = max(self.last, self.first_steps[stage] + step)
        return self.last
