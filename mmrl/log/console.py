"""The console of a run: a live display on a terminal, and a line now and then when the output is piped.

Messages quote data, so control characters are escaped here, before rich adds its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread
from typing import TextIO, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console as Screen
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from mmrl.log.metric_registry import METRICS, Metric
from mmrl.utils.activity import Activity
from mmrl.utils.messages import escape_controls

# Width of tables in a pipe, in characters; a pipe itself has no width.
_PIPE_WIDTH = 160
# A piped stage prints a line at the end of a step if it has printed none for longer.
_MAX_SILENCE_S = 60.0
# Seconds to the first line about a task that is still running; later pauses double up to `_MAX_SILENCE_S`.
_FIRST_REMINDER_S = 5.0
# Steps before a remaining time is shown: the first steps are slower and would predict too much.
_MIN_STEPS_FOR_ETA = 5
# The live line shows an activity that lasts this long; shorter ones would only flicker.
_MIN_ACTIVITY_S = 1.0
# The part of an activity after which a remaining time is shown. Responses that are generated together end late and
# together, so the first ones would predict many times too much.
_MIN_FRACTION_FOR_ETA = 0.2
# Activities in the words of the live line. Others are shown by their own name.
_ACTIVITY_WORDS = {
    "prompt": "building prompts",
    "rollout": "generating responses",
    "score": "scoring",
    "select": "selecting",
    "learn": "learning from micro-batches",
    "sync": "syncing weights",
    "save": "saving",
}

Item = TypeVar("Item")
Result = TypeVar("Result")


class _CountAndTimes(ProgressColumn):
    """Shows the number of finished items, the elapsed time and the time left; unknown values are left out."""

    def render(self, task: Task) -> Text:
        """Return the text for a task."""
        text = "" if task.total is None else f"{task.completed:,.0f}/{task.total:,.0f}  "
        text += _clock(task.elapsed or 0)
        if task.time_remaining is not None and not task.finished:
            text += f", {_clock(task.time_remaining)} left"
        return Text(text)


class _ProgressBar(Progress):
    """A progress bar. The bar of a stage also has a line of metrics and one of the current activity beneath it."""

    metrics_line = ""
    activity: Activity | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bar and the lines beneath it."""
        yield self.make_tasks_table(self.tasks)
        if self.activity is not None:
            for line in (self.metrics_line, describe_activity(self.activity, _MIN_ACTIVITY_S)):
                if line:
                    yield Text(f"  {line}", style="dim", no_wrap=True, overflow="ellipsis")


@dataclass(slots=True)
class _StageProgress:
    """Progress of the current stage. Times are readings of the monotonic clock, in seconds."""

    name: str
    total_steps: int
    first_step: int  # steps that were done when the stage started here: more than 0 in a resumed run
    started_at: float
    last_printed_at: float
    pending_line: str = ""  # line of the last step, if it has not been printed


@contextmanager
def repeat_in_thread(work: Callable[[], None], pause_s: float, longest_pause_s: float) -> Iterator[None]:
    """Call `work` in a thread while this block runs, after pauses that double from `pause_s` to `longest_pause_s`."""
    ended = Event()  # while the block hangs, the thread goes on calling, so that the user notices

    def repeat(pause_s: float) -> None:
        while not ended.wait(pause_s):
            pause_s = min(2 * pause_s, longest_pause_s)
            work()

    thread = Thread(target=repeat, args=(pause_s,), daemon=True, name="repeat")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Console:
    """Prints progress, messages and tables, on a terminal or into a pipe."""

    def __init__(self, file: TextIO | None = None, *, quiet: bool = False, activity: Activity | None = None) -> None:
        """Print to `file`, by default standard output. With `quiet`, for all ranks but 0, print nothing.

        `activity` is shown while a stage is running.
        """
        terminal = False if quiet else None  # None lets rich find out
        self._screen = Screen(file=file, highlight=False, emoji=False, quiet=quiet, force_terminal=terminal)
        if not self._screen.is_terminal:
            self._screen.width = _PIPE_WIDTH
        self.activity = activity or Activity()  # written by the parts of a run
        self._stage: _StageProgress | None = None
        self._bar: _ProgressBar | None = None
        self._display = ExitStack()  # the bar of a stage, or its repeated line in a pipe
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
        if self._screen.quiet:
            yield from items
        elif not self._screen.is_terminal:
            done = 0
            started_at = time.monotonic()

            def describe() -> str:
                count = f"{done:,} of {total:,}, " if total else f"{done:,}, " if done else ""
                return f"{description} ... {count}{time.monotonic() - started_at:.0f} s"

            with self._print_repeatedly(describe, _FIRST_REMINDER_S):
                for item in items:
                    yield item
                    done += 1
        elif self._bar is not None:
            task = self._bar.add_task(description, total=total)
            try:
                yield from self._bar.track(items, total=total, task_id=task)
            finally:
                self._bar.remove_task(task)
        else:
            with self._make_bar(transient=True) as bar:
                yield from bar.track(items, total=total, description=description)

    def wait_for(self, description: str, work: Callable[[], Result]) -> Result:
        """Return the result of `work`; if it takes more than a few seconds, show that it is still running."""
        [result] = self.track(description, (task() for task in [work]))
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
            self._bar = self._make_bar(transient=False)
            self._bar.activity = self.activity
            self._bar.add_task(name, total=total, completed=done)
            self._display.enter_context(self._bar)
        elif not self._screen.quiet:
            describe = partial(self._describe_long_activity, name)
            self._display.enter_context(self._print_repeatedly(describe, _MAX_SILENCE_S))

    def show_step(self, step: int, metrics: Mapping[str, float], times: Mapping[str, float]) -> None:
        """Show the step that just ended, counted from 1, with its values that have a label."""
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
            stage.pending_line += f"  {_clock(seconds_left)} left"
        is_tenth = step % max(1, round(stage.total_steps / 10)) == 0
        is_first_or_last = steps_here == 1 or step == stage.total_steps
        if is_tenth or is_first_or_last or now - stage.last_printed_at >= _MAX_SILENCE_S:
            self.info(stage.pending_line)
            stage.pending_line, stage.last_printed_at = "", now

    def end_stage(self) -> None:
        """End the display of the stage; the line of its last step stays visible."""
        if self._stage is not None and self._stage.pending_line:
            self.info(self._stage.pending_line)
        self._display.close()
        self._bar = self._stage = None

    def _make_bar(self, *, transient: bool) -> _ProgressBar:
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None, table_column=Column(max_width=40)),  # shrinks on a narrow terminal
            _CountAndTimes(table_column=Column(no_wrap=True)),
        )
        # By default rich forgets steps after 30 s, so it would predict nothing for a stage with longer steps.
        return _ProgressBar(
            *columns, console=self._screen, transient=transient, refresh_per_second=4, speed_estimate_period=3600
        )

    def _print_repeatedly(self, describe: Callable[[], str], pause_s: float) -> AbstractContextManager[None]:
        """Print what `describe` returns, if anything, after pauses that double from `pause_s` to a minute."""

        def print_line() -> None:
            if line := describe():
                self.info(line)

        return repeat_in_thread(print_line, pause_s, _MAX_SILENCE_S)

    def _describe_long_activity(self, stage: str) -> str:
        text = describe_activity(self.activity, _MAX_SILENCE_S)
        return text and f"{stage}: {text}, {time.monotonic() - self.activity.started_at:.0f} s so far"


def describe_activity(activity: Activity, min_seconds: float) -> str:
    """Return the activity with its progress and remaining time; empty if it began less than `min_seconds` ago."""
    name, count = activity.name, activity.counts.get(activity.name)
    seconds = time.monotonic() - activity.started_at
    if not name or seconds < min_seconds:
        return ""
    text = _ACTIVITY_WORDS.get(name, name)
    if count is not None:
        done, total = count
        text += f" {done:,} of {total:,}"
        if _MIN_FRACTION_FOR_ETA * total <= done < total:
            text += f", {_clock(seconds / done * (total - done))} left"
    return escape_controls(text)


def _clock(seconds: float) -> str:
    minutes, seconds_part = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds_part:02d}"
