"""The process of each tracker, `python -m mmrl.trackers.process RUN NAME BASE_DIR`, and how a run starts and ends it.

A tracker's library has threads, exit handlers and a server that may not answer; here it can neither delay a step nor
the run's end. Standard input receives the run's status when it ends, and nothing when it is killed. Standard output has
lines for the user; what libraries print goes to RUN/trackers/NAME.log.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import IO, Final, NoReturn

from mmrl.config import Config, load_config
from mmrl.log.console import Console
from mmrl.log.logger import RunState, report_end
from mmrl.log.run_dir import RunDir
from mmrl.trackers.follower import Follower, count_unsent
from mmrl.utils.processes import die_with_parent, kill_processes

_POLL_S: Final = 1.0
_FIRST_RETRY_S, _MAX_RETRY_S = 10.0, 600.0
# Seconds that trackers have for what is left: a run that was stopped can send it when it resumes.
_DRAIN_S: Final = {"finished": 30.0, "stopped": 10.0, "failed": 10.0}
Started = tuple[str, subprocess.Popen[str], Thread]


@contextmanager
def follow_run(config: Config, base_dir: Path, run_dir: RunDir, console: Console) -> Iterator[None]:
    """Let the trackers of a config follow the run inside this block. Nothing that happens to them ends it."""
    started = [start_tracker(name, base_dir, run_dir, console) for name in config.logging.trackers]
    with report_end(partial(_end, started, run_dir, console)):
        yield


def start_tracker(name: str, base_dir: Path, run_dir: RunDir, console: Console) -> Started:
    """Start the process of a tracker, and a thread that prints its lines."""
    command = [sys.executable, "-m", "mmrl.trackers.process", str(run_dir.path), name, str(base_dir)]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    # In a session of its own: Ctrl-C in a terminal is for the run, which then ends this process.
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True, start_new_session=True)

    def print_lines() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            console.warn(f"tracker {name} {line.rstrip()} (details: {run_dir.trackers / name}.log)")

    printer = Thread(target=print_lines, daemon=True, name=f"tracker {name}")
    printer.start()
    return name, process, printer


def _end(started: Sequence[Started], run_dir: RunDir, console: Console, status: RunState) -> None:
    """Let the trackers send what is left, and say what they have not sent."""
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
            command = f"echo {status} | python -m mmrl.trackers.process {run_dir.path} {name} ."
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
