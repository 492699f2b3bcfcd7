"""One finished training step, and the callbacks that run after it: logging, benchmarks, validation, checkpoints.

`mmrl.training.stage.build_callbacks` puts them in order; `StepLogger` calls the user's. Imports without torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from statistics import fmean
from typing import TYPE_CHECKING, Literal, Protocol

from mmrl.config.schema import RolloutRecordsConfig, ValidationConfig
from mmrl.distributed.exchanges import gather_token_values
from mmrl.distributed.ranks import Ranks
from mmrl.log.logger import MetricsLogger
from mmrl.log.metric_registry import Metric, find_builtin_metric
from mmrl.log.rollout_records import list_scored_records, list_step_records
from mmrl.protocols import Learner
from mmrl.types import (
    Author,
    EvalRewards,
    Group,
    RunInterrupted,
    SelectedExperiences,
    TrainingState,
    UserError,
)
from mmrl.utils.activity import Activity
from mmrl.utils.plugin_args import check_methods, locate_function

if TYPE_CHECKING:
    from mmrl.checkpoint import CheckpointManager
    from mmrl.rollout.logprob_check import LogprobCheck
    from mmrl.training.build import RunComponents

EvalMoment = Literal["before", "step", "after"]
"""Moment at which benchmarks may be due: before the first stage, after a step, or at the end of a stage."""


@dataclass(slots=True, kw_only=True)
class TrainStepResult:
    """Groups, metrics and times of one training step. All callbacks of the step receive the same object."""

    selected: SelectedExperiences  # groups, advantages, experiences; in `sft` a demonstration is a group of one
    metrics: Mapping[str, float]  # reproducible numbers of the step; the user's earlier callbacks have added theirs
    seconds: Mapping[str, float]  # wall-clock time by activity, named `time/<activity>_s`
    rollouts_file: str | None = None  # file with the step's rollouts, set by `StepLogger` when it wrote one


class Callback(Protocol):
    """Something to do after each training step.

    Callbacks run on every rank, after the weights were updated and `state.step` was advanced. A callback ends its stage
    by setting `state.stage_done`, on all ranks.
    """

    def on_step_end(self, state: TrainingState, result: TrainStepResult) -> Mapping[str, float] | None:
        """React to a finished step; `state.step` steps of the stage are done. A user's callback may return metrics."""


@dataclass(slots=True)
class StepTimer:
    """Accumulates the wall-clock seconds of one step by activity, and keeps `current` up to date."""

    current: Activity = field(default_factory=Activity)  # the current activity; in a run, the console shows it
    seconds: dict[str, float] = field(default_factory=dict)  # by `time/<activity>_s`

    @contextmanager
    def time(self, activity: str) -> Iterator[None]:
        """Add the time spent inside this block to `activity`."""
        start = time.perf_counter()
        with self.current.during(activity):
            yield
        name = f"time/{activity}_s"
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class UserCallback:
    """A callback of the config, whose metrics become metrics of the step."""

    fn: str  # its function's name in the config
    callback: Callback

    def on_step_end(self, state: TrainingState, result: TrainStepResult) -> None:
        """Call the user's callback, and add the metrics that it returns to `result.metrics`.

        Raises:
            UserError: it returned something other than metrics, or one whose name is taken.
        """
        returned = self.callback.on_step_end(state, result)
        owner = f"{locate_function(self.callback.on_step_end)}: callback {self.fn!r}"
        if not isinstance(returned, Mapping | None):
            raise UserError(f"{owner} returned {returned!r:.80}; return a mapping of metrics by name, or None")
        for name, value in (returned or {}).items():
            if not isinstance(name, str) or not isinstance(value, Real):
                raise UserError(f"{owner} returned {value!r:.80} as metric {name!r:.80}; return a number for each name")
            check_metric_name(owner, name, taken=result.metrics)
            result.metrics = {**result.metrics, name: float(value)}


def check_metric_name(owner: str, name: str, *, taken: Container[str]) -> None:
    """Raise a UserError if mmrl itself writes a metric of this name, or if it is `taken`.

    A name like `<step>/calls` is refused only if it is `taken`: mmrl writes it only for a rollout step of that name.
    """
    builtin = find_builtin_metric(name)
    if builtin and builtin.name.startswith("<step>/"):
        builtin = None
    if builtin or name in taken:
        writer = f"mmrl writes {builtin.name!r}" if builtin else "another callback has it"
        raise UserError(f"{owner}: the metric {name!r} is taken, as {writer}; choose another name, like 'my/metric'")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecorder:
    """Writes the rollouts of the steps that `options` selects; with `options.tokens` also the learner's token data."""

    options: RolloutRecordsConfig
    logger: MetricsLogger
    learner: Learner
    ranks: Ranks
    stage: str  # name of the stage

    def record_step(self, state: TrainingState, selected: SelectedExperiences, *, force: bool) -> str | None:
        """Write the step's rollouts if they are due, or all of them with `force`; return the file. Collective."""
        if not (force or state.step == 1 or state.step % self.options.every == 0):
            return None
        max_groups = len(selected.groups) if force else self.options.max_groups
        # The training loop has already advanced the version; the step trained from the one before.
        version = state.version - 1
        records = list_step_records(
            selected, max_groups=max_groups, version=version, has_gradient=self.learner.has_gradient
        )
        values = None
        if self.options.tokens:
            indices = [record.experience for record in records if record.experience is not None]
            values = gather_token_values(self.learner.token_values(indices), self.ranks)
        name = f"{self.stage}-{state.step:06d}"
        path = self.logger.write_rollouts(state, name, records, version=version, token_values=values)
        return None if path is None else str(path)

    def record_validation(self, state: TrainingState, groups: Sequence[Group]) -> None:
        """Write the answers of a validation."""
        name = f"{self.stage}-{state.step:06d}-validation"
        self.logger.write_rollouts(state, name, list_scored_records(groups), version=state.version)


@dataclass(frozen=True, slots=True)
class StepLogger:
    """Records rollouts, calls the user's callbacks, then logs the step: console, metrics.jsonl and timings.jsonl."""

    logger: MetricsLogger
    recorder: RolloutRecorder
    user_callbacks: Sequence[Callback] = ()  # add their metrics to the step's
    async_rollouts: bool = False
    only_failed_rollouts: bool = False  # record rollouts of steps with a non-finite gradient alone

    def on_step_end(self, state: TrainingState, result: TrainStepResult) -> None:
        """Record rollouts if they are due or an update failed, call the user's callbacks, and log the step."""
        failed = state.nonfinite_steps > 0
        if failed or not self.only_failed_rollouts:
            result.rollouts_file = self.recorder.record_step(state, result.selected, force=failed)
        times = {**result.seconds, **self._measure_speed(result)}
        try:
            for callback in self.user_callbacks:
                callback.on_step_end(state, result)
        finally:
            # Also when a callback raises: the last step of a failed run must be in its files.
            self.logger.log(state, result.metrics, times)

    def _measure_speed(self, result: TrainStepResult) -> dict[str, float]:
        """Return how many tokens the policy sampled per second, as a metric; no metric if that is not known."""
        seconds = result.seconds.get("time/rollout_s")
        # With asynchronous rollouts, `time/rollout_s` is only the wait for the background thread, so it gives no speed.
        if not seconds or self.async_rollouts:
            return {}
        tokens = 0
        for group in result.selected.groups:
            for rollout in group.all_rollouts:
                sampled = [segment.token_ids for segment in rollout.segments if segment.author is Author.POLICY]
                tokens += sum(map(len, sampled))
        return {"rollout/tokens_per_s": tokens / seconds} if tokens else {}


@dataclass(frozen=True, slots=True)
class LogprobChecker:
    """Repeats the check of the engine's log-probs with the weights after a step, if it is due, and logs the result."""

    check: LogprobCheck
    log_metrics: Callable[[TrainingState, Mapping[str, float]], None]

    def on_step_end(self, state: TrainingState, result: TrainStepResult) -> None:
        """Check and log if it is due. Raises as `LogprobCheck.measure`."""
        metrics = self.check.measure_if_due(state.version)
        if metrics:
            self.log_metrics(state, metrics)


@dataclass(frozen=True, slots=True)
class BenchmarkRunner:
    """Runs the benchmarks that are due at a moment of a stage, and logs their metrics."""

    evaluate_due: Callable[[TrainingState, EvalMoment], Mapping[str, float]]
    log_metrics: Callable[[TrainingState, Mapping[str, float]], None]

    def run(self, state: TrainingState, moment: EvalMoment) -> None:
        """Run and log the benchmarks that are due."""
        metrics = self.evaluate_due(state, moment)
        if metrics:
            self.log_metrics(state, metrics)

    def on_step_end(self, state: TrainingState, result: TrainStepResult) -> None:
        """Run and log the benchmarks that are due after this step."""
        self.run(state, "step")


@dataclass(frozen=True, slots=True)
class Validation:
    """Measures the held-out reward every `validation.every` steps, and ends the stage once it reaches its goal."""

    evaluate: Callable[[TrainingState], EvalRewards]  # returns the reward of each sample under the current weights
    options: ValidationConfig
    log_metrics: Callable[[TrainingState, Mapping[str, float]], None]
    record: Callable[[TrainingState, Sequence[Group]], None]  # writes the answers of some samples
    print_line: Callable[[str], None]

    def on_step_end(self, state: TrainingState, result: TrainStepResult) -> None:
        """Measure if it is due, and set `state.stage_done` if the goal is reached."""
        if state.step % self.options.every:
            return
        held_out = self.evaluate(state)
        self.record(state, held_out.groups)
        task_means = {task: fmean(rewards.values()) for task, rewards in held_out.rewards.items()}
        # The mean over tasks, not over samples: a task with many samples should not decide alone.
        mean = fmean(task_means.values())
        means = {**task_means, "mean": mean}
        metrics = {**means, **held_out.rollout_metrics}
        self.log_metrics(state, {f"validation/{name}": value for name, value in metrics.items()})
        rewards_text = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
        self.print_line(f"validation after {state.step} steps: {rewards_text}")
        goal = self.options.stop_at_mean_reward
        if goal is not None and mean >= goal:
            state.stage_done = True


@dataclass(frozen=True, slots=True)
class PeriodicCheckpointer:
    """Saves every `checkpoints.every` steps, and at once when the user has asked to stop."""

    save: Callable[[TrainingState], None]
    manager: CheckpointManager
    agree_to_stop: Callable[[], bool]
    every: int

    def on_step_end(self, state: TrainingState, result: TrainStepResult) -> None:
        """Save the run if a checkpoint is due or the user asked to stop.

        Raises:
            RunInterrupted: the user asked to stop; everything is saved.
            UserError: this checkpoint, or an earlier one in the background, cannot be written.
        """
        self.manager.commit_if_written()
        # `agree_to_stop` is collective, so every rank must call it, whatever the step.
        if not self.agree_to_stop() and state.step % self.every:
            return
        self.save(state)
        # Checked again: the signal may have arrived while the checkpoint was being saved.
        if self.agree_to_stop():
            self.manager.wait()
            raise RunInterrupted


def make_callbacks(run: RunComponents) -> list[UserCallback]:
    """Make the user's callbacks, and let the console show the metrics that they declare.

    Raises:
        UserError: a function returns no callback, or one whose metrics cannot be declared.
    """
    callbacks = []
    declared: list[str] = []
    for config, make in zip(run.config.callbacks, run.functions.callbacks, strict=True):
        owner = f"callback {config.fn!r}"
        callback = make(run)
        check_methods(callback, Callback, ("on_step_end",), owner=owner)
        metrics = getattr(callback, "metrics", ())
        if not isinstance(metrics, tuple) or not all(isinstance(metric, Metric) for metric in metrics):
            raise UserError(f"{owner}: its `metrics` are {metrics!r:.80}, not a tuple of mmrl.Metric")
        for metric in metrics:
            check_metric_name(owner, metric.name, taken=declared)
            declared.append(metric.name)
        run.console.add_metrics(metrics)
        callbacks.append(UserCallback(config.fn, callback))
    return callbacks
