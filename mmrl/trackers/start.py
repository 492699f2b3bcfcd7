"""Starts the processes of a run's trackers, prints their lines, and ends them within a bounded time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Final

from mmrl.config import Config
from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir
from mmrl.trackers.follower import count_unsent
from mmrl.trackers.tracker import RunStatus
from mmrl.types import RunInterrupted
from mmrl.utils.processes import kill_processes

# Seconds that trackers have for what is left: a run that was stopped can send it when it resumes.
_DRAIN_S: Final = {"finished": 30.0, "stopped": 10.0, "failed": 10.0}


@contextmanager
def follow_run(config: Config, base_dir: Path, run_dir: RunDir, console: Console) -> Iterator[None]:
    """Let the trackers of a config follow the run inside this block. Nothing that happens to them ends it."""
    processes: list[TrackerProcess] = []
    for tracker in config.logging.trackers:
        try:
            processes.append(TrackerProcess(tracker.kind, base_dir, run_dir, console))
        except OSError as error:  # the machine has no memory or process left
            console.warn(f"tracker {tracker.kind} does not follow this run: its process cannot be started: {error}")
    status: RunStatus = "failed"
    try:
        yield
        status = "finished"
    except (RunInterrupted, KeyboardInterrupt):
        status = "stopped"
        raise
    finally:
        _end(processes, status, run_dir, console)


class TrackerProcess:
    """The process that follows the run for one tracker."""

    def __init__(self, kind: str, base_dir: Path, run_dir: RunDir, console: Console) -> None:
        """Start it."""
        self.kind = kind
        self._run_dir, self._console = run_dir, console
        command = [sys.executable, "-m", "mmrl.trackers.process", str(run_dir.path), kind, str(base_dir)]
        # In a session of its own: Ctrl-C in a terminal is for the run, which then ends this process.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._printer = Thread(target=self._print_lines, daemon=True, name=f"tracker {kind}")
        self._printer.start()

    def announce_end(self, status: RunStatus) -> None:
        """Tell the process how the run has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead already
            self._process.stdin.write(status + "\n")
            self._process.stdin.flush()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended, at most so many seconds; return True if it has."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    def close(self) -> None:
        """Kill the process, unless it has ended, with all that it has started."""
        if self._process.poll() is None:
            kill_processes([self._process.pid])
            self._process.wait()
        self._printer.join(1.0)

    def _print_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            log = self._run_dir.trackers / f"{self.kind}.log"
            self._console.warn(f"tracker {self.kind} {line.rstrip()} (details: {log})")


def _end(processes: Sequence[TrackerProcess], status: RunStatus, run_dir: RunDir, console: Console) -> None:
    """Let the trackers send what is left, and say what they have not sent."""
    drain_s = _DRAIN_S[status]
    until = time.monotonic() + drain_s
    try:
        for process in processes:
            process.announce_end(status)
        for process in processes:
            if not process.wait(max(0.0, until - time.monotonic())):
                console.warn(f"tracker {process.kind} was still busy {drain_s:.0f} s after the run and was ended")
    finally:
        # Also after Ctrl-C: nobody has to wait for a tracker.
        for process in processes:
            process.close()
    for process in processes:
        unsent = count_unsent(run_dir, process.kind)
        if unsent:
            later = f"`mmrl track {run_dir.path} --to {process.kind}` sends them"
            console.warn(f"tracker {process.kind} lacks {unsent:,} lines of metrics.jsonl; {later}")
