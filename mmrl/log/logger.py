"""The run's logger: each step goes to the metrics file, the timings file, the rollout files and the console."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from mmrl.log.console import Console
from mmrl.log.metrics import MetricsFile, read_records
from mmrl.log.rollouts import write_rollouts
from mmrl.log.run_dir import RunDir
from mmrl.types import Group, TrainingState


class RunLogger:
    """The logger of rank 0. It implements `mmrl.ports.MetricsLogger` for a claimed run directory."""

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
            self._step_tokens += sum(rollout.num_tokens for rollout in group.all_rollouts)
        if not (force or state.step == 1 or state.step % self._save_rollouts_every == 0):
            return None
        return str(write_rollouts(self._rollouts_dir, self._stage, state.step, groups, advantages))

    def log(self, state: TrainingState, metrics: Mapping[str, float], times: Mapping[str, float]) -> None:
        """Record one step and show it on the console."""
        self.log_metrics(state, metrics)
        times = {**times, **self._throughput(times)}
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

    def _throughput(self, times: Mapping[str, float]) -> dict[str, float]:
        """Return the generation speed of the step in tokens per second, if it generated any."""
        tokens, self._step_tokens = self._step_tokens, 0
        seconds = times.get("time/rollout_s", 0.0)
        return {"rollout/tokens_per_s": tokens / seconds} if seconds and tokens else {}


class NullLogger:
    """The logger of all ranks but 0. It writes nothing, because rank 0 logs for the whole run."""

    @property
    def metrics(self) -> NullLogger:
        """Stand in for the metrics file."""
        return self

    def position(self) -> int:
        """Return the size of a file to which nothing was written."""
        return 0

    def sync(self) -> None:
        """Wait for nothing: no file is open."""

    def resume_from(self, position: int) -> None:
        """Ignore the position: no file is open."""

    def last_value(self, name: str) -> float | None:
        """Return None: values are recorded on rank 0."""

    def log_stage(self, name: str, steps: int, done: int = 0) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def log_rollouts(
        self, state: TrainingState, groups: Sequence[Group], advantages: Sequence[Sequence[float]], *, force: bool
    ) -> str | None:
        """Return None: rank 0 writes the rollouts."""

    def log(self, state: TrainingState, metrics: Mapping[str, float], times: Mapping[str, float]) -> None:
        """Ignore the step: rank 0 records it."""

    def log_progress(self, step: int) -> None:
        """Ignore the step: rank 0 shows it."""

    def log_metrics(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Ignore the values: rank 0 writes them."""

    def close(self) -> None:
        """Close nothing: no file is open."""


def print_summary(run_dir: RunDir, console: Console) -> None:
    """Print what a finished run achieved and where its files are."""
    summary = json.loads(run_dir.summary.read_text())
    if summary["tasks"]:
        title = f"Held-out reward before stage {summary['since']} and at the end (greedy, 95 % intervals)"
        rows = list(map(_format_task, summary["tasks"]))
        console.print_table(title, ("task", "n", "before", "after", "rise"), rows)
    console.info(f"Model: {run_dir.model}\nEverything: {run_dir.path}")


def _format_task(task: Mapping[str, Any]) -> tuple[str, ...]:
    before, after = task["before"], task["after"]
    return (
        task["task"],
        str(task["n"]),
        f"{before:.3f} {_format_interval(task['before_ci'])}",
        f"{after:.3f} {_format_interval(task['after_ci'])}",
        f"{after - before:+.3f} {_format_interval(task['ci'], sign='+')}",
    )


def _format_interval(ends: Sequence[float | None], sign: str = "") -> str:
    """Format an interval; an end that is not finite is null in summary.json and printed as a question mark."""
    texts = ["?" if end is None else f"{end:{sign}.2f}" for end in ends]
    return f"[{', '.join(texts)}]"
