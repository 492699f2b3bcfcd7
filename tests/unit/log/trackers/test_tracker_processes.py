"""What goes wrong with a tracker is reported once, and neither stops the run nor keeps it from ending."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import tracked_runs
from serving import serving
from waiting import wait_for

from mmrl.config import load_config
from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir
from mmrl.log.trackers import process
from mmrl.log.trackers.backends import TRACKERS
from mmrl.log.trackers.process import Follower, count_unsent, follow, follow_run
from mmrl.types import RunInterrupted
from mmrl.utils.files import temporary_path

LINES = tracked_runs.expected_lines()
POINTS = tracked_runs.expected_points(LINES)
STEPS = 11  # with that before the first


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    return tracked_runs.make_run(tmp_path)


@contextmanager
def tracked(run_dir: RunDir) -> Iterator[io.StringIO]:
    """Let the run's trackers follow it; the text is what the console printed."""
    printed = io.StringIO()
    config = load_config(run_dir.config).config
    with follow_run(config, run_dir.path, run_dir, Console(printed)):
        yield printed


@contextmanager
def looping(follower: Follower, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Follow in a thread as the process of a tracker does, with short pauses; yield what it reports."""
    monkeypatch.setattr(process, "_POLL_S", 0.01)
    monkeypatch.setattr(process, "_FIRST_RETRY_S", 0.01)
    reported: list[str] = []
    reading, writing = os.pipe()
    with open(reading) as run_end, open(writing, "w") as status:
        thread = Thread(target=follow, args=(follower, run_end, reported.append))
        thread.start()
        yield reported
        status.write("finished\n")
        status.flush()
        thread.join()


@pytest.fixture
def started(monkeypatch) -> list[int]:
    """The ids of the processes that are started."""
    pids: list[int] = []
    start_tracker = process.start_tracker

    def remember(*arguments):
        started = start_tracker(*arguments)
        pids.append(started[1].pid)
        return started

    monkeypatch.setattr(process, "start_tracker", remember)
    return pids


def test_a_process_follows_a_run_to_its_end(run_dir, started):
    with tracked(run_dir) as printed:
        for line in LINES:
            tracked_runs.append(run_dir, [line])
    assert tracked_runs.ours(tracked_runs.read_tensorboard(run_dir)) == POINTS
    assert printed.getvalue() == ""
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


@pytest.mark.parametrize("how", [RunInterrupted, KeyboardInterrupt, ValueError])
def test_a_hanging_tracker_is_ended_with_the_run_and_what_it_lacks_is_said(run_dir, started, monkeypatch, how):
    monkeypatch.setattr(process, "_DRAIN_S", dict.fromkeys(process._DRAIN_S, 0.2))
    with pytest.raises(how), tracked(run_dir) as printed:
        os.kill(started[0], signal.SIGSTOP)
        tracked_runs.append(run_dir, LINES)
        begun = time.monotonic()
        raise how
    assert time.monotonic() - begun < 20
    assert "tracker tensorboard was still busy 0 s after the run and was ended" in printed.getvalue()
    assert f"lacks the metrics of {STEPS} steps; `echo" in printed.getvalue().replace("\n", " ")
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_a_tracker_ends_with_a_run_that_is_killed(run_dir, tmp_path, started):
    tracked_runs.append(run_dir, LINES[:5])
    pid = os.fork()
    if not pid:
        with tracked(run_dir):
            wait_for(lambda: not count_unsent(run_dir, "tensorboard"))
            (tmp_path / "pid").write_text(str(started[0]))
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    # Its new parent may leave it as a zombie, which holds nothing any more.
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/status")
    wait_for(lambda: not status.exists() or "State:\tZ" in status.read_text())
    with tracked(run_dir):
        tracked_runs.append(run_dir, LINES[5:])
    assert tracked_runs.ours(tracked_runs.read_tensorboard(run_dir)) == POINTS


def test_a_tracker_that_raises_is_reported_once_and_tried_again(run_dir, tmp_path, monkeypatch):
    tracker = tracked_runs.FakeTracker(tmp_path / "points")
    log, failures = tracker.log, 5

    def fail_at_first(points):
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise ConnectionError("no\nnetwork")
        log(points)  # type: ignore[arg-type]

    monkeypatch.setattr(tracker, "log", fail_at_first)
    tracked_runs.append(run_dir, LINES[:5])
    with looping(tracked_runs.fake_follower(run_dir, tracker), monkeypatch) as reported:
        wait_for(lambda: tracked_runs.read_fake(tracker.path))
        tracked_runs.append(run_dir, LINES[5:])
    assert reported == [
        "failed: ConnectionError: no network; the run continues, and the tracker is tried again until its end"
    ]
    assert tracked_runs.ours(tracked_runs.read_fake(tracker.path)) == POINTS


@pytest.mark.parametrize("what", ["event file", "progress"])
def test_a_full_disk_is_reported_once_and_what_was_missed_is_sent_later(run_dir, monkeypatch, what):
    is_full = True

    open_tensorboard = TRACKERS["tensorboard"]

    def open_tracker(run):
        tracker: Any = open_tensorboard(run)
        if is_full and what == "event file":
            os.dup2(os.open("/dev/full", os.O_WRONLY), tracker._file.fileno())
        return tracker

    monkeypatch.setitem(TRACKERS, "tensorboard", open_tracker)
    follower = tracked_runs.make_follower(run_dir, "tensorboard")
    progress = temporary_path(run_dir.trackers / "tensorboard.json")
    if what == "progress":
        progress.symlink_to("/dev/full")
    tracked_runs.append(run_dir, LINES[:5])
    with looping(follower, monkeypatch) as reported:
        wait_for(lambda: reported)
        is_full = False
        tracked_runs.append(run_dir, LINES[5:])
        if what == "progress":
            wait_for(lambda: not progress.is_symlink())  # a file that cannot be written is removed again
    assert len(reported) == 1
    assert "No space left on device" in reported[0]
    assert tracked_runs.ours(tracked_runs.read_tensorboard(run_dir)) == POINTS


def test_steps_that_end_while_the_files_are_read_keep_their_times(run_dir, monkeypatch):
    waiting = list(LINES)
    read_records = process.read_records

    def read_while_the_run_continues(path, start):
        for _ in range(2):
            tracked_runs.append(run_dir, waiting[:1])
            del waiting[:1]
        records = list(read_records(path, start))
        tracked_runs.append(run_dir, waiting[:1])
        del waiting[:1]
        return iter(records)

    tracked_runs.append(run_dir, waiting[:2])
    del waiting[:2]
    monkeypatch.setattr(process, "read_records", read_while_the_run_continues)
    follower = tracked_runs.make_follower(run_dir, "tensorboard")
    while waiting:
        follower.send_new()
    follower.finish("finished")
    assert tracked_runs.ours(tracked_runs.read_tensorboard(run_dir)) == POINTS


def test_a_run_that_is_over_is_sent_by_the_command_that_the_warning_names(run_dir):
    tracked_runs.append(run_dir, LINES)
    command = f"echo finished | {sys.executable} -m mmrl.log.trackers.process {run_dir.path} tensorboard ."
    assert subprocess.run(command, shell=True, capture_output=True, check=True).stdout == b""
    assert tracked_runs.ours(tracked_runs.read_tensorboard(run_dir)) == POINTS


@pytest.mark.slow
def test_a_wrong_key_of_wandb_is_reported_once(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    run_dir = tracked_runs.make_run(tmp_path, "[wandb]")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    tracked_runs.append(run_dir, LINES)
    with serving(lambda handler: handler.send_error(401, "Unauthorized")) as url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        with tracked(run_dir) as printed:
            wait_for(printed.getvalue)
    text = " ".join(printed.getvalue().split())
    assert text.count("tracker wandb failed:") == 1
    assert f"tracker wandb lacks the metrics of {STEPS} steps" in text


@pytest.mark.slow
def test_a_server_of_mlflow_that_never_answers_costs_the_run_a_bounded_time(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setattr(process, "_DRAIN_S", dict.fromkeys(process._DRAIN_S, 1.0))
    asked = []

    def hang(handler):
        asked.append(handler.path)
        time.sleep(3600)

    with serving(hang) as url:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        run_dir = tracked_runs.make_run(tmp_path, "[mlflow]")
        with tracked(run_dir) as printed:
            tracked_runs.append(run_dir, LINES)
            wait_for(lambda: asked)
            begun = time.monotonic()
        assert time.monotonic() - begun < 20
    assert f"tracker mlflow lacks the metrics of {STEPS} steps" in " ".join(printed.getvalue().split())
