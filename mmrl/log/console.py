"""The console of a run: a live display on a terminal, and a line now and then when the output is piped.

Messages quote data, so control characters are escaped here, before rich adds its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import call
from pathlib import Path
from threading import Event, Thread
from typing import TextIO, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console as Screen
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mmrl.log.metric_registry import METRICS, Metric
from mmrl.utils.control_chars import escape_controls

# Columns of tables in a pipe, which has no width.
_PIPE_WIDTH = 160
# A piped stage prints a line at the end of a step if it has printed none for longer.
_MAX_SILENCE_S = 60.0
# The first line about a task that is still running; the pauses between later ones double up to `_MAX_SILENCE_S`.
_FIRST_HEARTBEAT_S = 5.0
# Steps before a remaining time is shown: the first steps are slower and would predict too much.
_MIN_STEPS_FOR_ETA = 5

Item = TypeVar("Item")
Result = TypeVar("Result")


class _ProgressBar(Progress):
    """A progress bar with a line of metrics beneath it."""

    metrics_line = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bar and the line of metrics."""
        yield self.make_tasks_table(self.tasks)
        yield Text(f"  {self.metrics_line}", style="dim", no_wrap=True, overflow="ellipsis")


@dataclass(slots=True)
class _StageProgress:
    """Progress of the current stage. Times are those of the monotonic clock, in seconds."""

    name: str
    total_steps: int
    first_step: int  # steps that were done when the stage started here: more than 0 in a resumed run
    started_at: float
    last_printed_at: float
    pending_line: str = ""  # line of the last step, if it has not been printed


class _Heartbeat:
    """Prints how far a task has come, from a thread, so that a task which hangs is seen to hang."""

    def __init__(self, print_line: Callable[[str], None], description: str, total: int | None) -> None:
        self.done = 0  # items that are finished
        self._print_line, self._description, self._total = print_line, description, total
        self._ended = Event()
        self._thread = Thread(target=self._run, daemon=True, name="heartbeat")

    def __enter__(self) -> _Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        started_at, pause_s = time.monotonic(), _FIRST_HEARTBEAT_S
        while not self._ended.wait(pause_s):
            pause_s = min(2 * pause_s, _MAX_SILENCE_S)
            count = f"{self.done:,} of {self._total:,}, " if self._total else f"{self.done:,}, " if self.done else ""
            self._print_line(f"{self._description} ... {count}{time.monotonic() - started_at:.0f} s")


class Console:
    """Prints progress, messages and tables, on a terminal or into a pipe."""

    def __init__(self, file: TextIO | None = None) -> None:
        """Print to `file`, or to standard output."""
        self._screen = Screen(file=file, highlight=False, emoji=False)
        if not self._screen.is_terminal:
            self._screen.width = _PIPE_WIDTH
        self._stage: _StageProgress | None = None
        self._bar: _ProgressBar | None = None
        self._metrics: tuple[Metric, ...] = METRICS

    def add_metrics(self, metrics: Iterable[Metric]) -> None:
        """Print what these metrics mean, and show those with a label from now on, after the built-in ones."""
        for metric in metrics:
            self.info(f"{metric.name}{metric.label and f' ({metric.label})'}: {metric.meaning}")
            self._metrics += (metric,)

    def info(self, text: str) -> None:
        """Print a message as it is, without markup."""
        self._screen.print(escape_controls(text), markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a message that should not be missed."""
        self._screen.print(Text(f"warning: {escape_controls(text)}", style="yellow"), soft_wrap=True)

    def track(self, description: str, items: Iterable[Item], total: int | None = None) -> Iterator[Item]:
        """Yield the items and show how many of `total` have been taken: a bar on a terminal, else a line now and then.

        The bar of a running stage stays visible, with this one beneath it.
        """
        if not self._screen.is_terminal:
            with _Heartbeat(self.info, description, total) as heartbeat:
                for item in items:
                    yield item
                    heartbeat.done += 1
        elif self._bar is not None:
            task = self._bar.add_task(description, total=total)
            try:
                yield from self._bar.track(items, total=total, task_id=task)
            finally:
                self._bar.remove_task(task)
        else:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, console=self._screen, transient=True) as bar:
                yield from bar.track(items, total=total, description=description)

    def wait_for(self, description: str, work: Callable[[], Result]) -> Result:
        """Return the result of `work`; if it takes more than a few seconds, show that it is still running."""
        [result] = self.track(description, map(call, [work]))
        return result

    def print_table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table. The first column is aligned to the left, the others to the right."""
        title_text = Text(escape_controls(title))
        table = Table(title=title_text, box=SIMPLE_HEAD, title_justify="left", title_style="bold")
        for index, column in enumerate(columns):
            table.add_column(Text(escape_controls(column)), justify="right" if index else "left")
        for row in rows:
            table.add_row(*[Text(escape_controls(cell)) for cell in row])
        self._screen.print(table)

    def start_stage(self, name: str, total: int, done: int = 0) -> None:
        """Begin the display of a stage with `total` steps, of which `done` are finished."""
        now = time.monotonic()
        self._stage = _StageProgress(name=name, total_steps=total, first_step=done, started_at=now, last_printed_at=now)
        if self._screen.is_terminal:
            columns = (
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("elapsed,"),
                TimeRemainingColumn(),
                TextColumn("left"),
            )
            self._bar = _ProgressBar(*columns, console=self._screen, refresh_per_second=4)
            self._bar.add_task(name, total=total, completed=done)
            self._bar.start()

    def show_step(self, step: int, metrics: Mapping[str, float], times: Mapping[str, float]) -> None:
        """Show the step that just ended, counted from 1, with those of its values that have a label."""
        stage = self._stage
        assert stage is not None, "start_stage comes first"
        shown = {**metrics, **times}
        labelled = [metric for metric in self._metrics if metric.label and metric.name in shown]
        values = "  ".join(f"{metric.label} {shown[metric.name]:{metric.form}}" for metric in labelled)
        if self._bar is not None:
            self._bar.metrics_line = values
            self._bar.update(self._bar.task_ids[0], completed=step)
            return
        now = time.monotonic()
        stage.pending_line = f"{stage.name} {step:>{len(str(stage.total_steps))}}/{stage.total_steps}  {values}"
        steps_here = step - stage.first_step
        if steps_here >= _MIN_STEPS_FOR_ETA:
            seconds_left = (now - stage.started_at) / steps_here * (stage.total_steps - step)
            minutes, seconds = divmod(round(seconds_left), 60)
            stage.pending_line += f"  {minutes // 60}:{minutes % 60:02d}:{seconds:02d} left"
        print_every = max(1, round(stage.total_steps / 10))
        if (
            steps_here == 1
            or step % print_every == 0
            or step == stage.total_steps
            or now - stage.last_printed_at >= _MAX_SILENCE_S
        ):
            self._print_pending_line(stage, now)

    def end_stage(self) -> None:
        """End the display of the stage; the line of its last step stays visible."""
        if self._bar is not None:
            self._bar.stop()
        elif self._stage is not None and self._stage.pending_line:
            self._print_pending_line(self._stage, time.monotonic())
        self._bar = self._stage = None

    def _print_pending_line(self, stage: _StageProgress, now: float) -> None:
        self.info(stage.pending_line)
        stage.pending_line, stage.last_printed_at = "", now


def null_console() -> Console:
    """Return a console that prints nothing, for all ranks but 0."""
    return Console(Path(os.devnull).open("w", encoding="utf-8"))
