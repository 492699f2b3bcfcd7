"""Whole runs with a tracker: what it has in the end."""

from collections import Counter
from pathlib import Path

import pytest
from harness import experiment, metrics, rl_stage, run_mmrl, sft_stage, succeed, write
from tracked_runs import Points, read_tensorboard

from mmrl.log.run_dir import RunDir

TRACKED = "logging.trackers=[tensorboard]"


def short_config(folder: Path) -> Path:
    stages = [sft_stage(steps=3, validation={"every": 2}), rl_stage(steps=4)]
    return write(experiment(folder / "run", stages=stages), folder / "tiny.yaml")


def check_points(run_dir: Path) -> None:
    """Check that TensorBoard has each number of metrics.jsonl once, at its step among all stages'."""
    expected: Points = Counter()
    for record in metrics(run_dir):
        # The test samples are measured before the steps of the second stage, in a step of its own.
        step = record["step"] + {"cold": 0, "rl": 4, None: 8}[record["stage"]]
        names = [name for name, value in record.items() if isinstance(value, int | float) and name != "step"]
        expected.update((step, name) for name in names)
    found = read_tensorboard(RunDir(run_dir))
    times = {key for key in found if key[1].startswith("time/")}
    assert {(step, "time/learn_s") for step in (1, 2, 3, 5, 6, 7, 8)} <= times
    assert set(found.values()) == {1}
    beside = {"stage/index", "stage/step", "rollout/tokens_per_s"}
    assert {key for key in found if key not in times and key[1] not in beside} == set(expected)


def test_a_run_is_in_tensorboard_and_ends_as_without_it(tmp_path, in_process):
    done = succeed(in_process("train", short_config(tmp_path), TRACKED))
    assert "tracker" not in done.output + done.errors
    check_points(tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_has_each_point_once(tmp_path):
    config = short_config(tmp_path)
    fault = ("mmrl.log.logger:RunLogger.log", 6, "SIGKILL")
    killed = run_mmrl("train", config, TRACKED, "checkpoints.every=2", fault=fault)
    assert killed.code == -9, killed.errors
    succeed(run_mmrl("train", config, TRACKED, "checkpoints.every=2"))
    check_points(tmp_path / "run")
