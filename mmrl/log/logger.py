"""The teller: each step goes to the metrics file, the timings file, the rollout store and the console."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from mmrl.log.console import Console
from mmrl.log.metrics import MetricsFile, read_records
from mmrl.log.rollouts import write_rollouts
from mmrl.log.run_dir import RunDir
from mmrl.types import Group, TrainingState


class RunLogger:
    """Implements `mmrl.ports.MetricsLogger` for a claimed run directory."""

    def __init__(self, run_dir: RunDir, console: Console, *, save_rollouts_every: int) -> None:
        """Open the run's files; every `keep_rollouts_every`-th step's rollouts are kept, and the first's."""
        self.console = console
        self._path = run_dir.metrics
        self.metrics = MetricsFile(run_dir.metrics)
        self._timings = MetricsFile(run_dir.timings)
        self._rollouts = run_dir.rollouts
        self._save_rollouts_every = save_rollouts_every
        self._stage = ""
        self._tokens = 0
        self._last_values: dict[str, float] = {}

    def resume_from(self, position: int) -> None:
        """Forget the metrics after `position` of their file, and remember those before.

        Raises:
            UserError: the file does not have a line that ends there.
        """
        self.metrics.truncate(position)
        for record in read_records(self._path, position):
            self._last_values |= {
                name: float(value) for name, value in record.items() if isinstance(value, int | float)
            }

    @contextmanager
    def log_stage(self, name: str, steps: int, done: int = 0) -> Iterator[None]:
        """Tell of a stage of `steps` steps of which `done` lie behind."""
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
        """Keep the step's rollouts for reading, if it is one of those kept or `at_all_events`; returns the file."""
        self._tokens = sum(rollout.num_tokens for group in groups for rollout in group.all_rollouts)
        if not (force or state.step == 1 or state.step % self._save_rollouts_every == 0):
            return None
        return str(write_rollouts(self._rollouts, self._stage, state.step, groups, advantages))

    def log(self, state: TrainingState, metrics: Mapping[str, float], times: Mapping[str, float]) -> None:
        """Record one step and show it."""
        self.log_metrics(state, metrics)
        times = {**times, **self._throughput(times)}
        self._timings.append({"stage": self._stage, "step": state.step, **times})
        self.console.show_step(state.step, metrics, times)

    def log_progress(self, step: int) -> None:
        """Show that a step of a stage without metrics has ended."""
        self.console.show_step(step, {}, {})

    def log_metrics(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Write numbers to the metrics file alone (an evaluation, say); `stage` is null between stages."""
        self._last_values |= {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self.metrics.append({"stage": self._stage or None, "step": state.step, **dict(sorted(metrics.items()))})

    def last_value(self, name: str) -> float | None:
        """The last finite value recorded of a metric; None where there is none."""
        return self._last_values.get(name)

    def close(self) -> None:
        """Close the files."""
        self.metrics.close()
        self._timings.close()

    def _throughput(self, times: Mapping[str, float]) -> dict[str, float]:
        seconds = times.get("time/rollout_s", 0.0)
        speed = {"rollout/tokens_per_s": self._tokens / seconds} if seconds and self._tokens else {}
        self._tokens = 0
        return speed


class NullLogger:
    """The teller of every process but the first: what it would tell is told there."""

    @property
    def metrics(self) -> NullLogger:
        """No file."""
        return self

    def position(self) -> int:
        """Nothing was written."""
        return 0

    def sync(self) -> None:
        """Nothing to wait for."""

    def resume_from(self, position: int) -> None:
        """There is nothing to forget."""

    def last_value(self, name: str) -> float | None:
        """Remembered by the first."""

    def log_stage(self, name: str, steps: int, done: int = 0) -> AbstractContextManager[None]:
        """Nothing to show."""
        return nullcontext()

    def log_rollouts(
        self, state: TrainingState, groups: Sequence[Group], advantages: Sequence[Sequence[float]], *, force: bool
    ) -> str | None:
        """Kept by the first."""

    def log(self, state: TrainingState, metrics: Mapping[str, float], times: Mapping[str, float]) -> None:
        """Told by the first."""

    def log_progress(self, step: int) -> None:
        """Shown by the first."""

    def log_metrics(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Recorded by the first."""

    def close(self) -> None:
        """No file is open."""
