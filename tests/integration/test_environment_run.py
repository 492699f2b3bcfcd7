"""Runs that act in an environment: credit for turns, replay, blind probes; a killed one ends with the same bytes."""

import json
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest
from environment_runs import STEP, environment_config
from harness import check_metrics_alike, metrics, reproducible_files, run_mmrl, scheduled, succeed, undisturbed, write
from interrupts import train_until_signal
from json_lines import read_json_lines
from zoom_runs import check_all_occurred, learned_steps

from mmrl.rollout.environments.episodes import EpisodeWorkers

pytestmark = pytest.mark.slow

EVERYTHING = {"replay": {"capacity": 32}, "async_rollouts": True, "validation": {"every": 3}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The directory of a run that was not interrupted."""
    return undisturbed(tmp_path_factory, "environment", partial(environment_config, **EVERYTHING))


def test_turns_are_credited_recorded_and_counted(whole):
    steps = learned_steps(whole)
    check_all_occurred(steps, "environment/turns", "environment/media_shown", "replay/frac", "environment/truncated")
    assert all(record["environment/errors"] == 0 for record in steps)
    assert any(name.startswith("probe/blind_gap/grey/") for record in steps for name in record)
    lines = [json.loads(line) for path in (whole / "rollouts").glob("rl-*.jsonl") for line in path.open()]
    assert {turn["state"] for line in lines for turn in line["turns"]} > {"start"}
    credited = [line for line in lines if "turn_advantages" in line]
    assert any(len(set(line["turn_advantages"])) > 1 for line in credited)
    assert all(len(line["turn_advantages"]) == len(line["turns"]) for line in credited)
    # What a replayed rollout earned stands in the record of the step that generated it.
    for line in (line for line in credited if line["selection"]["status"] != "replayed"):
        assert len(line["turn_rewards"]) == len(line["turns"])
        assert sum(line["turn_rewards"]) == pytest.approx(line["total"])


def test_an_evaluation_plays_the_episodes_that_validation_played(tmp_path, whole, in_process):
    assert in_process("eval", whole, "--benchmark", "run:validation", "--out", tmp_path / "out").code == 0
    predictions = read_json_lines(tmp_path / "out" / "predictions.jsonl")
    assert predictions
    assert all(row["turns"] and row["failure"] is None for row in predictions)
    told = [record["validation/count"] for record in metrics(whole) if "validation/count" in record]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["rewards"] == {"count": pytest.approx(told[-1])}


@pytest.mark.parametrize("nth", [3, 14])  # tools/faults.py kills at random moments, on two ranks, too
def test_run_killed_in_the_middle_of_episodes_ends_like_the_whole_one(tmp_path, whole, in_process, nth):
    config = write(environment_config(tmp_path / "run", **EVERYTHING), tmp_path / "tiny.yaml")
    killed = run_mmrl("train", config, fault=("mmrl.rollout.environments.episodes:EpisodeWorkers.play", nth, "SIGKILL"))
    assert killed.code == -signal.SIGKILL, killed.errors
    assert in_process("train", config).code == 0
    assert reproducible_files(tmp_path / "run") == reproducible_files(whole)


@pytest.mark.parametrize(
    "advantage", [{"credit": "to_go", "compare": "group", "discount": 0.8}, {"credit": "gigpo", "step_weight": 0.5}]
)
def test_two_ranks_credit_turns_as_one_does(tmp_path, in_process, advantage):
    options = {"rollout_steps": [{"kind": "generate"}, STEP], "advantage": advantage, "steps": 3}
    options["optimizer"] = scheduled(3e-3, 3)
    once, twice = (write(environment_config(tmp_path / name, **options), tmp_path / f"{name}.yaml") for name in "12")
    assert in_process("train", once).code == 0
    succeed(run_mmrl("train", twice, "--nproc", 2))
    steps = learned_steps(tmp_path / "1")
    assert any(record["advantage/max"] > 0 for record in steps)
    check_metrics_alike(metrics(tmp_path / "2"), metrics(tmp_path / "1"))


def test_two_ranks_and_partial_rollouts_learn_the_same(tmp_path, in_process):
    partial = {"kind": "generate", "partial_rollout_tokens": 3, "oversampling": 1.5, "max_tokens_per_step": 60}
    options = {"rollout_steps": [partial, {**STEP, "workers": 2}], "replay": {"capacity": 32}}
    once, twice = (write(environment_config(tmp_path / name, **options), tmp_path / f"{name}.yaml") for name in "12")
    assert in_process("train", once).code == 0
    train_until_signal(in_process, twice, EpisodeWorkers, "play", 11, signal.SIGINT)
    succeed(run_mmrl("train", twice, "--nproc", 2))
    check_metrics_alike(metrics(tmp_path / "2"), metrics(tmp_path / "1"))


def test_pictures_that_nothing_names_are_deleted_at_a_checkpoint(tmp_path, in_process):
    config = write(
        environment_config(tmp_path / "run", rollout_steps=[{"kind": "generate"}, STEP]), tmp_path / "t.yaml"
    )
    train_until_signal(in_process, config, EpisodeWorkers, "play", 11, signal.SIGINT)
    frames = tmp_path / "run/data/frames"
    (frames / f"{'0' * 64}.png").write_bytes(b"of a step that was lost")
    for frame in frames.iterdir():
        os.utime(frame, (0.0, 0.0))
    assert in_process("train", config).code == 0
    left = {frame.name for frame in frames.iterdir()}
    lines = "".join(path.read_text() for path in (tmp_path / "run/rollouts").glob("*.jsonl"))
    named = set(re.findall(r"frames/([0-9a-f]{64}\.png)", lines))
    assert f"{'0' * 64}.png" not in left
    assert named and named <= left
