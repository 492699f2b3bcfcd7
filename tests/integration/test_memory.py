"""Replay buffer and carried-over groups outlive a stop, and are the same on all ranks."""

from pathlib import Path

import pytest
from harness import (
    check_metrics_alike,
    counting,
    experiment,
    metrics,
    reproducible_files,
    rl_stage,
    run_mmrl,
    sft_stage,
    stop_in_rl,
    succeed,
    write,
)


def replay_config(folder: Path, name: str) -> Path:
    """Write a config of eight steps after a cold start; its filter passes groups with one right answer or none."""
    band = {"term": "count", "high": 0.2, "require_mixed": False}
    rl = rl_stage(
        steps=8,
        prompts_per_step=3,
        group_size=6,
        ppo_epochs=1,
        loss={"entropy": {"coef": 0.02}},  # moves the weights by every rollout that is trained on
        dynamic_sampling={"ranges": [band], "max_rounds": 2, "extra": "carry"},
        replay={"max_staleness": 3},
    )
    data = {"train": [counting("train", 12)], "test": [counting("test", 4)]}
    return write(experiment(folder / name, stages=[sft_stage(steps=16), rl], data=data), folder / f"{name}.yaml")


@pytest.mark.slow
def test_run_with_replay_and_carried_groups_ends_the_same_when_stopped_or_on_two_ranks(tmp_path, in_process):
    once, twice, shared = (replay_config(tmp_path, name) for name in ("once", "twice", "shared"))
    assert in_process("train", once).code == 0
    whole = metrics(tmp_path / "once")
    later = [record for record in whole if record["stage"] == "rl"][5:]
    assert max(record["replay/staleness_max"] for record in later) >= 2
    assert max(record["groups/carried_over"] for record in later) >= 1

    stop_in_rl(twice, 5)
    assert in_process("train", twice).code == 0
    assert reproducible_files(tmp_path / "twice") == reproducible_files(tmp_path / "once")

    succeed(run_mmrl("train", shared, "--nproc", 2))
    check_metrics_alike(metrics(tmp_path / "shared"), whole)
