"""Whole runs whose rewards fail, hang and die: such rollouts are left out and counted, and change nothing else."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fork_server import Forked
from harness import experiment, metrics, reproducible_files, rl_stage, run_mmrl, succeed, write
from waiting import PATIENCE_S, wait_for

from mmrl.utils.processes import list_tree

pytestmark = pytest.mark.slow

REWARDS = """
import os
import time
from zlib import crc32

from mmrl.types import RewardValue, Unscorable
from mmrl_rewards.contract import reward


def fate(response, sample) -> int:
    if not response.text or response.answer.value == sample.target.value:
        return 9  # the checks before the first step pass
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


def write_config(folder: Path, run: str, fn: str, **rewards: object) -> Path:
    (folder / "mine.py").write_text(REWARDS)
    term = {"fn": f"./mine.py:{fn}", "when": {"task": ["count"]}}
    section: dict[str, Any] = {"terms": [term, {"fn": "format:tags", "weight": 0.5}], **rewards}
    stage = rl_stage(steps=3)
    return write(experiment(folder / run, rewards=section, stages=[stage]), folder / f"{run}.yaml")


def total(folder: Path, name: str) -> float:
    return sum(record.get(name, 0) for record in metrics(folder))


@pytest.mark.parametrize("policy", ["skip", "skip_group", "fallback"])
def test_a_run_continues_without_rollouts_whose_reward_failed_and_workers_change_nothing(tmp_path, in_process, policy):
    options = {"on_missing_score": policy, "on_error": policy}
    for run, workers in (("alone", 0), ("together", 2)):
        assert in_process("train", write_config(tmp_path, run, "mood", workers=workers, **options)).code == 0
    assert reproducible_files(tmp_path / "alone") == reproducible_files(tmp_path / "together")
    run = tmp_path / "alone"
    assert total(run, "reward/mood/unscorable") > 0
    assert total(run, "reward/mood/errors") > 0
    records = [json.loads(line) for file in sorted((run / "rollouts").glob("rl-*.jsonl")) for line in file.open()]
    left_out = [record for record in records if "dropped" in record]
    assert bool(left_out) is (policy != "fallback")
    assert len(records) == 2 * 16  # of two steps, every rollout


def test_calls_that_hang_and_processes_that_die_are_counted_and_the_run_continues(tmp_path, in_process):
    done = succeed(in_process("train", write_config(tmp_path, "run", "danger", on_error="fallback")))
    for kind in ("timeouts", "crashes", "errors"):
        assert total(tmp_path / "run", f"reward/danger/{kind}") > 0
    assert "its fallback counts" in done.output


LOOPING = """
from mmrl.types import RewardValue
from mmrl_rewards.contract import reward


def loop(rollout):
    # Never in the checks before the first step.
    if rollout.finish_reason == "length":
        with open(__file__ + ".looping", "a") as log:
            log.write("x")
        while True:
            pass


@reward(name="looping")
def looping(response, sample) -> float:
    loop(response)
    return 0.0


def group(group):
    for rollout in group.rollouts:
        loop(rollout)
    return [RewardValue(0.0, "")] * len(group.rollouts)
"""


@pytest.mark.parametrize("kind", ["terms", pytest.param("group_rewards", marks=pytest.mark.slow)])
def test_ctrl_c_does_not_wait_for_a_reward_that_loops(tmp_path, kind):
    config = write_looping_config(tmp_path, kind)
    run = Forked(["-m", "mmrl", "train", config])
    wait_for((tmp_path / "mine.py.looping").exists)
    started = list_tree(run.pid)[1:]
    os.kill(run.pid, signal.SIGINT)
    output, errors = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 128 + signal.SIGINT, errors
    assert "Stopped. This step is not saved; the last checkpoint is, if there is one. Continue with: mmrl" in output
    assert len(started) >= 2
    wait_for(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in started))


UNSTEADY = """
import time
from zlib import crc32
from mmrl.types import RewardValue


def unsteady(group):
    if crc32(group.prompt.sample.id.encode()) % 3 == 0:
        time.sleep(600)
    return [RewardValue(float(len(rollout.text)), "") for rollout in group.rollouts]
"""


def test_two_ranks_agree_on_which_group_reward_has_hung(tmp_path):
    (tmp_path / "mine.py").write_text(UNSTEADY)
    own = [{"fn": "./mine.py:unsteady"}]
    rewards = {"terms": [{"fn": "mmrl_rewards.format:tags"}], "group_rewards": own, "timeout_s": 1.0}
    counts = []
    for run, options in (("one", []), ("two", ["--nproc", "2"])):
        config = experiment(tmp_path / run, rewards=rewards, stages=[rl_stage(steps=3)])
        succeed(run_mmrl("train", write(config, tmp_path / f"{run}.yaml"), *options))
        counts.append([record.get("reward/unsteady/timeouts", 0) for record in metrics(tmp_path / run)])
    assert counts[0] == counts[1]
    assert sum(counts[0]) > 0


def write_looping_config(folder: Path, kind: str) -> Path:
    (folder / "mine.py").write_text(LOOPING)
    rewards: dict[str, Any] = {"terms": [{"fn": "mmrl_rewards.format:tags"}], "timeout_s": 10 * PATIENCE_S}
    rewards.setdefault(kind, []).append({"fn": f"./mine.py:{'looping' if kind == 'terms' else 'group'}"})
    return write(experiment(folder / "run", rewards=rewards, stages=[rl_stage()]), folder / "run.yaml")
