"""Each tracker against its own files or database on this machine, over kills, without a network."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import tracked_runs
from follow_and_die import follow_in_fork

from mmrl.log.run_dir import RunDir

LINES = tracked_runs.expected_lines()
POINTS = tracked_runs.expected_points(LINES)


def check_killed_twice(
    run_dir: RunDir,
    name: str,
    read: Callable[[], tracked_runs.Points],
    *,
    first: str = "after",
    follow: Callable[[RunDir, str, str, int], int] = tracked_runs.follow_in_process,
) -> None:
    """Kill the follower `first` and before the tracker took a batch; then each point must be there once."""
    tracked_runs.write_rollouts(run_dir, 2)
    tracked_runs.append(run_dir, LINES[:9])
    assert follow(run_dir, name, first, 2) == -signal.SIGKILL
    tracked_runs.resume_at(run_dir, 2)
    tracked_runs.append(run_dir, LINES[2:])
    assert follow(run_dir, name, "before", 2) == -signal.SIGKILL
    tracked_runs.resume_at(run_dir, 5)
    tracked_runs.append(run_dir, LINES[5:])
    assert follow(run_dir, name, "end", 1) == 0
    assert tracked_runs.ours(read()) == POINTS


def test_tensorboard_reads_each_point_once_after_kills(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = tracked_runs.make_run(tmp_path)
    check_killed_twice(run_dir, "tensorboard", lambda: tracked_runs.read_tensorboard(run_dir), follow=follow_in_fork)
    accumulator = EventAccumulator(str(run_dir.tensorboard))
    accumulator.Reload()
    assert [event.step for event in accumulator.Images("rollouts/1")] == [6]
    texts = accumulator.Tags()["tensors"]
    assert {"run/config", "run/summary", "rollouts"} <= set(texts)
    config = accumulator.Tensors("run/config")[0].tensor_proto.string_val[0].decode()
    assert '"stages.1.steps": "20"' in config
    assert '"manifest.git.commit": "ab12"' in config


@pytest.mark.slow
def test_wandb_has_each_point_once_in_its_offline_files_after_kills(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = tracked_runs.make_run(tmp_path)
    check_killed_twice(run_dir, "wandb", lambda: tracked_runs.read_wandb(run_dir), first="before")
    assert list(run_dir.trackers.glob("wandb/offline-run-*/files/media/images/*.png"))


@pytest.mark.slow
def test_wandb_may_double_only_the_batch_that_was_taken_when_it_was_killed(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = tracked_runs.make_run(tmp_path)
    tracked_runs.append(run_dir, LINES)
    assert tracked_runs.follow_in_process(run_dir, "wandb", "after", 2) == -signal.SIGKILL
    assert tracked_runs.follow_in_process(run_dir, "wandb", "end", 1) == 0
    points = tracked_runs.ours(tracked_runs.read_wandb(run_dir))
    assert set(points) == set(POINTS)
    assert {step for (step, _), count in points.items() if count > 1} <= {2, 3}


@pytest.mark.slow
def test_trackio_has_each_point_once_in_its_database_after_kills(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    storage = pytest.importorskip("trackio.sqlite_storage")
    # The variable is read at import, and TRL, which an earlier test may have loaded here, imports Trackio.
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path / "trackio")
    run_dir = tracked_runs.make_run(tmp_path, **{"logging.project": "p"})
    check_killed_twice(run_dir, "trackio", lambda: tracked_runs.read_trackio("p"))
    assert list((tmp_path / "trackio").rglob("*.png"))


@pytest.mark.slow
def test_mlflow_has_each_point_once_in_its_database_after_kills(tmp_path):
    pytest.importorskip("mlflow")
    run_dir = tracked_runs.make_run(tmp_path, **{"logging.project": "p"})
    check_killed_twice(run_dir, "mlflow", lambda: tracked_runs.read_mlflow(run_dir, "p"))
    assert list(Path(run_dir.trackers).glob("mlflow-artifacts/*/artifacts/images/*.png"))
