"""Replay buffer and carried-over groups outlive a stop, and are the same on all ranks."""

from pathlib import Path

import harness
import pytest


def replay_config(folder: Path, name: str) -> Path:
    """Write a config of eight steps after a cold start; its filter passes groups with one right answer or none."""
    band = {"term": "count", "high": 0.2, "require_mixed": False}
    rl = harness.rl_stage(
        steps=8,
        prompts_per_step=3,
        group_size=6,
        ppo_epochs=1,
        loss={"entropy": {"coef": 0.02}},  # moves the weights by every rollout that is trained on
        dynamic_sampling={"ranges": [band], "max_rounds": 2, "extra": "carry"},
        replay={"max_staleness": 3},
    )
    data = {"train": [harness.counting("train", 12)], "test": [harness.counting("test", 4)]}
    return harness.write(
        harness.experiment(folder / name, stages=[harness.sft_stage(steps=16), rl], data=data), folder / f"{name}.yaml"
    )


@pytest.mark.slow
def test_run_with_replay_and_carried_groups_ends_the_same_when_stopped_or_on_two_ranks(tmp_path, in_process):
    once, twice, shared = (replay_config(tmp_path, name) for name in ("once", "twice", "shared"))
    assert in_process("train", once).code == 0
    whole = harness.metrics(tmp_path / "once")
    later = [record for record in whole if record["stage"] == "rl"][5:]
    assert max(record["replay/staleness_max"] for record in later) >= 2
    assert max(record["groups/carried_over"] for record in later) >= 1

    harness.stop_in_rl(twice, 5)
    assert in_process("train", twice).code == 0
    assert harness.reproducible_files(tmp_path / "twice") == harness.reproducible_files(tmp_path / "once")

    harness.succeed(harness.run_mmrl("train", shared, "--nproc", 2))
    harness.check_metrics_alike(harness.metrics(tmp_path / "shared"), whole)
