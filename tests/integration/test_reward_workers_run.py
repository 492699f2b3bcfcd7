"""Whole runs whose rewards fail, hang and die: what cannot be judged is left out, counted, and changes nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import Command, contents, experiment, metrics, rl_stage, write

REWARDS = """
import os
import time
from zlib import crc32

from mmrl.types import RewardValue, Unscorable
from mmrl_rewards.contract import reward


def fate(response, sample) -> int:
    if not response.text or response.answer.value == sample.target.value:
        return 9  # what is tried at the start goes well
    return crc32(response.text.encode()) % 10


@reward(name="mood")
def mood(response, sample, *, offset: float = 0.0) -> RewardValue:
    match fate(response, sample):
        case 0 | 1:
            raise Unscorable("no verdict")
        case 2 | 3:
            raise ValueError("no luck")
    return RewardValue(min(1.0, offset + len(response.text) % 5 / 5), f"{len(response.text)} characters")


@reward(name="danger", timeout_s=2.0)
def danger(response, sample) -> RewardValue:
    match fate(response, sample):
        case 0:
            time.sleep(100)
        case 1:
            os._exit(1)
    return mood.fn(response, sample)
"""


def judged_by(folder: Path, run: str, fn: str, **rewards: object) -> Path:
    (folder / "mine.py").write_text(REWARDS)
    term = {"fn": f"./mine.py:{fn}", "when": {"task": ["count"]}}
    section: dict[str, Any] = {"terms": [term, {"fn": "format:tags", "weight": 0.5}], **rewards}
    stage = rl_stage(steps=3)
    return write(experiment(folder / run, rewards=section, stages=[stage]), folder / f"{run}.yaml")


def total(folder: Path, name: str) -> float:
    return sum(record.get(name, 0) for record in metrics(folder))


@pytest.mark.parametrize("policy", ["skip", "skip_group", "fallback"])
def test_a_run_goes_on_without_what_cannot_be_judged_and_workers_change_nothing(
    tmp_path: Path, here: Command, policy: str
) -> None:
    options = {"on_unscorable": policy, "on_error": policy}
    for run, workers in (("alone", 0), ("together", 2)):
        assert here("train", judged_by(tmp_path, run, "mood", workers=workers, **options)).code == 0
    assert contents(tmp_path / "alone") == contents(tmp_path / "together")
    run = tmp_path / "alone"
    assert total(run, "reward/mood/unscorable") > 0
    assert total(run, "reward/mood/errors") > 0
    records = [json.loads(line) for file in sorted((run / "rollouts").iterdir()) for line in file.open()]
    left_out = [record for record in records if "skipped" in record]
    assert bool(left_out) is (policy != "fallback")
    assert len(records) == 2 * 16  # of two steps, every rollout


def test_calls_that_hang_and_processes_that_die_are_counted_and_the_run_goes_on(tmp_path: Path, here: Command) -> None:
    done = here("train", judged_by(tmp_path, "run", "danger", on_error="fallback"))
    assert done.code == 0
    assert total(tmp_path / "run", "reward/danger/timeouts") > 0
    assert total(tmp_path / "run", "reward/danger/crashes") > 0
    assert total(tmp_path / "run", "reward/danger/errors") > 0
    assert "its fallback counts" in done.output
