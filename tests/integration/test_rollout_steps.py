"""A run with forced continuations and blind probes, from YAML to its metrics."""

from __future__ import annotations

import json

import pytest
from harness import contents, experiment, metrics, mmrl, rl_stage, write

LOOK = {"kind": "rethink", "correct": ["count"], "max_new_tokens": 6, "triggers": [{"text": " Wait."}]}
STEPS = [{"kind": "generate"}, {**LOOK, "temperature": 0.9, "fraction": 0.5}, {"kind": "probe", "corruption": "grey"}]


def rethinking(run_dir):
    stage = rl_stage(rollout_steps=STEPS, steps=6)
    evaluation = {"max_new_tokens": 6, "batch_size": 8, "rollout_steps": [{"kind": "generate"}, LOOK]}
    return experiment(run_dir, stages=[experiment(run_dir)["stages"][0], stage], evaluation=evaluation)


@pytest.fixture(scope="module")
def again(tmp_path_factory):
    """The directory of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("rollout_steps")
    done = mmrl("train", write(rethinking(folder / "run"), folder / "tiny.yaml"))
    assert done.code == 0, done.errors
    return folder / "run"


def test_a_run_with_continuations_and_probes_tells_of_them(again):
    told = [record for record in metrics(again) if record["stage"] == "rl" and "rethink/attempted" in record]
    assert len(told) == 6
    for record in told:
        moves = [record[f"rethink/{a}_to_{b}"] for a in ("correct", "incorrect") for b in ("correct", "incorrect")]
        assert sum(moves) == record["rethink/attempted"] == record["rethink/kept"]
        assert sum(name.startswith("probe/blind_gap/grey/") for name in record) == 2
    assert sum(record["rethink/attempted"] for record in told) > 0
    tested = [record for record in metrics(again) if "test/count" in record]
    assert len(tested) == 2
    for record in tested:
        moves = [record[f"test/rethink/{a}_to_{b}"] for a in ("correct", "incorrect") for b in ("correct", "incorrect")]
        assert sum(moves) == record["test/rethink/attempted"] <= 6
    assert sum(record["test/rethink/attempted"] for record in tested) > 0
    kept = [json.loads(line) for file in (again / "rollouts").glob("rl-*") for line in file.read_text().splitlines()]
    seconds = [record for record in kept if len(record["segments"]) == 3]
    assert seconds
    for record in seconds:
        assert [segment["author"] for segment in record["segments"]] == ["policy", "forced", "policy"]
        assert " Wait." in record["response"]


def test_such_a_run_goes_on_as_if_it_had_never_stopped(here, tmp_path, again):
    """Stopped by Ctrl-C in its fourth step of reinforcement, after a continuation of the policy that trains."""
    config = write(rethinking(tmp_path / "run"), tmp_path / "tiny.yaml")
    stopped = mmrl("train", config, strike=("mmrl.rollout.engine_sampler:EngineSampler.sync", 4, "SIGINT"))
    assert "Saved." in stopped.output, stopped.errors
    assert here("train", config).code == 0
    assert contents(tmp_path / "run") == contents(again)
