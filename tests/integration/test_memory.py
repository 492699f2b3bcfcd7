"""What a run remembers of earlier steps, replay and carried groups: it outlives a stop and is the same on all ranks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from harness import Command, alike, contents, counting, experiment, metrics, mmrl, rl_stage, sft_stage, write


def remembering(folder: Path, name: str) -> Path:
    """The config of eight steps after a short cold start. The filter passes groups with one right answer or none."""
    band = {"term": "count", "high": 0.2, "require_mixed": False}
    rl = rl_stage(
        steps=8,
        prompts_per_step=3,
        group_size=6,
        ppo_epochs=1,
        loss={"entropy": {"coef": 0.02}},  # moves the weights by every rollout that is learned
        dynamic_sampling={"ranges": [band], "max_rounds": 2, "extra": "carry"},
        replay={"max_staleness": 3},
    )
    data = {"train": [counting("train", 12)], "test": [counting("test", 4)]}
    return write(experiment(folder / name, stages=[sft_stage(steps=16), rl], data=data), folder / f"{name}.yaml")


@pytest.mark.slow
def test_a_run_that_remembers_ends_alike_when_stopped_or_shared_by_two_ranks(tmp_path: Path, here: Command) -> None:
    once, twice, shared = (remembering(tmp_path, name) for name in ("once", "twice", "shared"))
    assert here("train", once).code == 0
    whole = metrics(tmp_path / "once")
    later = [record for record in whole if record["stage"] == "rl"][5:]
    assert max(record["replay/staleness_max"] for record in later) >= 2
    assert max(record["groups/carried_over"] for record in later) >= 1

    stopped = mmrl("train", twice, strike=("mmrl.rollout.engine_sampler:EngineSampler.sync", 5, "SIGINT"))
    assert stopped.code == 128 + signal.SIGINT
    assert here("train", twice).code == 0
    assert contents(tmp_path / "twice") == contents(tmp_path / "once")

    done = mmrl("train", shared, "--nproc", 2)
    assert done.code == 0, done.errors
    alike(metrics(tmp_path / "shared"), whole)
