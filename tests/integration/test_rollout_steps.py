"""A run with forced rethinking, blind probes and greedy responses, from YAML to its metrics."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import experiment, metrics, reproducible_files, rl_stage, run_mmrl, undisturbed, write
from zoom_runs import check_all_occurred

RETHINK = {"kind": "rethink", "correct": ["count"], "max_new_tokens": 6, "triggers": [{"text": " Wait."}]}
MOVES = [f"rethink/{a}_to_{b}" for a in ("correct", "incorrect") for b in ("correct", "incorrect")]


def rethink_config(run_dir: Path) -> dict[str, Any]:
    rethink = {**RETHINK, "temperature": 0.9, "fraction": 0.5}
    probes = [{"kind": "probe", "corruption": "grey"}, {"kind": "greedy"}]
    rl = rl_stage(rollout_steps=[{"kind": "generate"}, rethink, *probes], steps=6, advantage={"baseline": "batch_mean"})
    rewards = experiment(run_dir)["rewards"]
    rewards["group_rewards"] = [{"fn": "mmrl.algo.group_rewards:greedy_baseline"}]
    evaluation = {"max_new_tokens": 6, "batch_size": 8, "rollout_steps": [{"kind": "generate"}, RETHINK]}
    return experiment(run_dir, stages=[experiment(run_dir)["stages"][0], rl], evaluation=evaluation, rewards=rewards)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The directory of a run that was not interrupted."""
    return undisturbed(tmp_path_factory, "rollout_steps", rethink_config)


def test_run_with_continuations_and_probes_reports_them(whole):
    steps = [record for record in metrics(whole) if record["stage"] == "rl" and "rethink/attempted" in record]
    assert len(steps) == 6
    for record in steps:
        assert sum(record[move] for move in MOVES) == record["rethink/attempted"] == record["rethink/kept"]
        assert sum(name.startswith("probe/blind_gap/grey/") for name in record) == 2
        assert not any(name.startswith("probe/blind_gap/greedy") for name in record)
        assert record["reward/term/greedy_baseline"] <= 0.0
    tests = [record for record in metrics(whole) if "test/count" in record]
    assert len(tests) == 2
    for record in tests:
        assert sum(record[f"test/{move}"] for move in MOVES) == record["test/rethink/attempted"] <= 6
    check_all_occurred(steps, "rethink/attempted")
    check_all_occurred(tests, "test/rethink/attempted")
    saved = [json.loads(line) for file in (whole / "rollouts").glob("rl-*.jsonl") for line in file.open()]
    for row in saved:
        assert row["terms"]["greedy_baseline"]["value"] == -row["probes"]["greedy"]["total"]
    continued = [row for row in saved if len(row["segments"]) == 3]
    assert continued
    for row in continued:
        assert [segment["author"] for segment in row["segments"]] == ["policy", "forced", "policy"]
        assert " Wait." in row["response"]


@pytest.mark.slow
def test_run_stopped_in_rl_ends_like_the_whole_one(in_process, tmp_path, whole):
    config = write(rethink_config(tmp_path / "run"), tmp_path / "tiny.yaml")
    stopped = run_mmrl("train", config, fault=("mmrl.rollout.engine_sampler:EngineSampler.sync", 4, "SIGINT"))
    assert "Saved." in stopped.output, stopped.errors
    assert in_process("train", config).code == 0
    assert reproducible_files(tmp_path / "run") == reproducible_files(whole)
