"""The log of a run: metrics and timings as JSON lines, rollouts for people to read, and a line on the console.

metrics.jsonl holds only values that follow from the config and its seed, so a run that was killed and resumed ends with
the same bytes as one that was not. Wall-clock values go to timings.jsonl, where a repeated step appears twice.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from pathlib import Path
from typing import Any

from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir
from mmrl.types import Group, ImageRef, Rollout, TrainingState, UserError, VideoRef
from mmrl.utils.files import check_not_deleted, json_line, report_write_errors, write_atomically

_MAX_LINE_BYTES = 1 << 20


class RunLogger:
    """The logger of rank 0, for a claimed run directory."""

    def __init__(self, run_dir: RunDir, console: Console, *, save_rollouts_every: int) -> None:
        """Open the run's files. Rollouts are saved after the first and every `save_rollouts_every`-th step."""
        self.console = console
        self.metrics = MetricsFile(run_dir.metrics)
        self._metrics_path = run_dir.metrics
        self._timings = MetricsFile(run_dir.timings)
        self._rollouts_dir = run_dir.rollouts
        self._save_rollouts_every = save_rollouts_every
        self._stage = ""
        self._step_tokens = 0  # generated tokens of the step in progress
        self._last_values: dict[str, float] = {}

    def resume_from(self, position: int) -> None:
        """Cut metrics.jsonl at byte `position`, and read the last value of each metric before it.

        Raises:
            UserError: no line of the file ends at `position`.
        """
        self.metrics.truncate(position)
        # `checkpoints.best` may name a metric that was last recorded before the run was resumed.
        for record in read_records(self._metrics_path, position):
            for name, value in record.items():
                if isinstance(value, int | float):
                    self._last_values[name] = float(value)

    @contextmanager
    def log_stage(self, name: str, steps: int, done: int = 0) -> Iterator[None]:
        """Label everything inside this block with a stage of `steps` steps, of which `done` are finished."""
        self._stage = name
        self.console.start_stage(name, steps, done)
        try:
            yield
        finally:
            self.console.end_stage()
            self._stage = ""

    def log_rollouts(
        self, state: TrainingState, groups: Sequence[Group], advantages: Sequence[Sequence[float]], *, force: bool
    ) -> str | None:
        """Write the step's rollouts if the schedule or `force` says so; return the file's path."""
        self._step_tokens = 0
        for group in groups:
            self._step_tokens += sum(map(attrgetter("num_tokens"), group.all_rollouts))
        if not (force or state.step == 1 or state.step % self._save_rollouts_every == 0):
            return None
        return str(write_rollouts(self._rollouts_dir, self._stage, state.step, groups, advantages))

    def log(self, state: TrainingState, metrics: Mapping[str, float], times: Mapping[str, float]) -> None:
        """Record one step and show it on the console."""
        self.log_metrics(state, metrics)
        seconds = times.get("time/rollout_s", 0.0)
        if seconds and self._step_tokens:
            times = {**times, "rollout/tokens_per_s": self._step_tokens / seconds}
        # A step whose rollouts are not logged here, such as one of supervised training, has no speed of generation.
        self._step_tokens = 0
        self._timings.append({"stage": self._stage, "step": state.step, **times})
        self.console.show_step(state.step, metrics, times)

    def log_progress(self, step: int) -> None:
        """Show the end of a step that has no metrics."""
        self.console.show_step(step, {}, {})

    def log_metrics(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Write values to metrics.jsonl alone, such as those of an evaluation. Between stages `stage` is null."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._last_values[name] = float(value)
        self.metrics.append({"stage": self._stage or None, "step": state.step, **dict(sorted(metrics.items()))})

    def last_value(self, name: str) -> float | None:
        """Return the last finite value of a metric, or None if it was never recorded."""
        return self._last_values.get(name)

    def close(self) -> None:
        """Close the files of this logger."""
        self.metrics.close()
        self._timings.close()


class NullLogger:
    """The logger of all ranks but 0. It writes nothing, because rank 0 logs for the whole run."""

    def _ignore(self, *_: object, **__: object) -> None:
        """Do nothing."""

    resume_from = log = log_rollouts = log_progress = log_metrics = last_value = sync = close = _ignore

    @property
    def metrics(self) -> NullLogger:
        """Stand in for the metrics file."""
        return self

    def position(self) -> int:
        """Return the size of a file to which nothing was written."""
        return 0

    def log_stage(self, name: str, steps: int, done: int = 0) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()


MetricsLogger = RunLogger | NullLogger
"""The logger of any rank."""


class MetricsFile:
    """A file to which one JSON object a line is appended. A value that is not finite is written as null."""

    def __init__(self, path: Path) -> None:
        """Open the file, and cut off a last line that a killed run left incomplete."""
        self._path = path
        with report_write_errors(path):
            # Unbuffered: a killed run loses nothing that `append` has returned from.
            self._file = path.open("a+b", buffering=0)
            size = self._file.seek(0, os.SEEK_END)
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
        # An open file takes what is written in silence, even if it was deleted.
        check_not_deleted(self._path)
        with report_write_errors(self._path):
            # An unbuffered write may take only a part of the bytes.
            while remaining:
                remaining = remaining[self._file.write(remaining) :]

    def position(self) -> int:
        """Return the size of the file in bytes; a checkpoint records it."""
        return self._file.seek(0, os.SEEK_END)

    def sync(self) -> None:
        """Wait until everything written is on disk; called before a checkpoint that records the position is."""
        with report_write_errors(self._path):
            os.fsync(self._file.fileno())

    def truncate(self, position: int) -> None:
        """Delete everything after byte `position`, where a resumed run continues.

        Raises:
            UserError: no line of the file ends there.
        """
        size = self._file.seek(0, os.SEEK_END)
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


def read_records(path: Path, end: int) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics file up to byte `end`."""
    with path.open("rb") as file:
        while file.tell() < end:
            yield json.loads(file.readline())


def write_rollouts(
    folder: Path, stage: str, step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float]]
) -> Path:
    """Write a step's rollouts to `<stage>-<step>.jsonl` in `folder`, one JSON line each, media by path.

    The scored rollouts of a group come first, then its dropped ones. Returns the file.

    Raises:
        UserError: the file cannot be written.
    """
    path = folder / f"{stage}-{step:06d}.jsonl"
    check_not_deleted(folder.parent)
    with report_write_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for group, group_advantages in zip(groups, advantages, strict=True):
        for rollout, score, advantage in zip(group.rollouts, group.scores, group_advantages, strict=True):
            outcome = {
                "terms": {name: {"value": term.value, "reason": term.reason} for name, term in score.terms.items()},
                "total": score.total,
                "advantage": advantage,
            }
            lines.append(_rollout_line(folder.parent, rollout, outcome))
        for rollout, failures in group.dropped:
            # There are no failures if the rollout was dropped because a sibling failed.
            reasons = {name: f"{failure.error_kind}: {failure.reason}" for name, failure in failures.items()}
            lines.append(_rollout_line(folder.parent, rollout, {"skipped": reasons}))
    write_atomically(path, "".join(lines))
    return path


def _rollout_line(run_dir: Path, rollout: Rollout, outcome: Mapping[str, Any]) -> str:
    sample = rollout.prompt.sample
    question = ""
    for part in sample.parts:
        match part:
            case ImageRef():
                question += "<image>"
            case VideoRef():
                question += "<video>"
            case _:
                question += part
    segments = []
    for segment in rollout.segments:
        record: dict[str, Any] = {"author": segment.author, "n": len(segment.token_ids)}
        # The file that a tool showed, and the part of it: an image's crop, or a video's time span in seconds.
        match segment.observation and segment.observation.ref:
            case ImageRef(path=path, timestamp=at, crop=crop):
                record |= {"shows": path, "at": at, "crop": crop}
            case VideoRef(path=path, start=start, end=end):
                record |= {"shows": path, "start": start, "end": end}
        segments.append(record)
    media = []
    for ref in sample.media:
        file = Path(ref.path)
        # Paths inside the run directory are relative, so that it can be moved.
        media.append(str(file.relative_to(run_dir) if file.is_relative_to(run_dir) else file))
    return json_line(
        {
            "sample": sample.id,
            "task": sample.task,
            "rollout": rollout.index,
            "question": question,
            "response": rollout.text,
            "answer": rollout.answer.value,
            "target": sample.target.value,
            "frame": sample.target.coordinate_system,
            "finish": rollout.finish_reason,
            "segments": segments,
            **outcome,
            "media": media,
        }
    )
