"""Each tracker against its own files or database on this machine, over kills, without a network."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from follow_and_die import follow_in_fork
from tracked_runs import (
    Points,
    append,
    expected_lines,
    expected_points,
    follow_in_process,
    make_run,
    ours,
    read_mlflow,
    read_tensorboard,
    read_trackio,
    read_wandb,
    resume_at,
    write_rollouts,
)

from mmrl.log.run_dir import RunDir

LINES = expected_lines()
POINTS = expected_points(LINES)


def check_killed_twice(
    run_dir: RunDir, read: Callable[[], Points], follow: Callable[[RunDir, str, int], int] = follow_in_process
) -> None:
    """Kill the follower before and after the tracker took a batch; then each point must be there once."""
    write_rollouts(run_dir, 2)
    append(run_dir, LINES[:9])
    assert follow(run_dir, "after", 2) == -signal.SIGKILL
    resume_at(run_dir, 2)
    append(run_dir, LINES[2:])
    assert follow(run_dir, "before", 3) == -signal.SIGKILL
    resume_at(run_dir, 5)
    append(run_dir, LINES[5:])
    assert follow(run_dir, "end", 1) == 0
    assert ours(read()) == POINTS


def test_tensorboard_reads_each_point_once_after_kills(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = make_run(tmp_path)
    check_killed_twice(run_dir, lambda: read_tensorboard(run_dir), follow_in_fork)
    accumulator = EventAccumulator(str(run_dir.tensorboard))
    accumulator.Reload()
    assert [event.step for event in accumulator.Images("rollouts/1")] == [6]
    texts = accumulator.Tags()["tensors"]
    assert {"run/config", "run/facts", "run/summary", "rollouts"} <= set(texts)
    config = accumulator.Tensors("run/config")[0].tensor_proto.string_val[0].decode()
    assert '"stages.1.steps": 20' in config


@pytest.mark.slow
def test_wandb_has_each_point_once_in_its_offline_files_after_kills(tmp_path):
    pytest.importorskip("wandb")
    run_dir = make_run(tmp_path, "[{kind: wandb, mode: offline, project: p, tags: [t]}]")
    check_killed_twice(run_dir, lambda: read_wandb(run_dir))
    assert list(run_dir.trackers.glob("wandb/offline-run-*/files/media/images/*.png"))


@pytest.mark.slow
def test_trackio_has_each_point_once_in_its_database_after_kills(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    run_dir = make_run(tmp_path, "[{kind: trackio, project: p}]")
    check_killed_twice(run_dir, lambda: read_trackio("p"))
    assert list((tmp_path / "trackio").rglob("*.png"))


@pytest.mark.slow
def test_mlflow_has_each_point_once_in_its_database_after_kills(tmp_path):
    pytest.importorskip("mlflow")
    run_dir = make_run(tmp_path, "[{kind: mlflow, project: p}]")
    check_killed_twice(run_dir, lambda: read_mlflow(run_dir, "p"))
    assert list(Path(run_dir.trackers).glob("mlflow-artifacts/*/artifacts/images/*.png"))
