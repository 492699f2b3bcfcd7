"""`mmrl train --verify-resume` proves a run exact, and says so when it is not."""

from pathlib import Path
from typing import Any

import pytest
from harness import counting, experiment, rl_stage, run_mmrl, scheduled, sft_stage, succeed, write
from zoom_runs import corners, partial_config

FORGETFUL = """
from mmrl_rewards.contract import reward

@reward(name="moody")
def moody(response, sample) -> float:
    with open({memory!r}, "a+") as file:  # what a reward must not have: a memory that no checkpoint knows of
        file.write(".")
        return (file.tell() % 7) / 7
"""


def short(folder: Path, **sections: object) -> Path:
    data = {"train": [counting("train", 6)], "test": [counting("test", 2)]}
    cold = sft_stage(steps=4, optimizer=scheduled(1e-2, 4))
    sections = {"data": data, "stages": [cold, short_rl_stage()], **sections}
    return write(experiment(folder / "run", **sections), folder / "tiny.yaml")


def short_rl_stage() -> dict[str, Any]:
    return rl_stage(steps=4, optimizer=scheduled(3e-3, 4))


@pytest.mark.slow
def test_a_reproducible_run_is_reported_as_byte_equal(tmp_path):
    done = succeed(run_mmrl("train", short(tmp_path), "--verify-resume", "--steps", 4))
    assert "killed in stage cold, after line 3" in done.output and "killed in stage rl" in done.output
    assert "VERDICT: the resumed run is the undisturbed one, byte for byte in all" in done.output
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_with_replay_rethinking_and_tools_resumes_byte_equal(tmp_path, zoomed):
    """With partial rollouts, KL and a rate that decays, on so few samples that replayed ones come up again."""
    config = partial_config(tmp_path / "run", zoomed / "model")
    config["data"]["train"] = [corners("train", 8)]
    _, rl = config["stages"]
    rl |= {"loss": {"kl": {"coef": 0.05}}, "optimizer": scheduled(1e-3, 6)}
    rl["replay"] = {**rl["replay"], "without_replacement": False}
    config["stages"] = [rl]
    done = succeed(run_mmrl("train", write(config, tmp_path / "tiny.yaml"), "--verify-resume", "--steps", 6))
    assert "killed in stage rl" in done.output
    assert "VERDICT: the resumed run is the undisturbed one, byte for byte in all" in done.output


@pytest.mark.slow
def test_a_killed_run_of_two_processes_resumes_byte_equal(tmp_path):
    config = short(tmp_path, stages=[short_rl_stage()])
    done = succeed(run_mmrl("train", config, "--verify-resume", "--steps", 4, "--nproc", 2))
    assert "killed in stage rl" in done.output
    assert "VERDICT: the resumed run is the undisturbed one, byte for byte in all" in done.output


@pytest.mark.slow
def test_a_run_that_resumes_otherwise_names_the_files_that_differ(tmp_path):
    (tmp_path / "moody.py").write_text(FORGETFUL.format(memory=str(tmp_path / "memory")))
    config = short(tmp_path, rewards={"terms": [{"fn": "./moody.py:moody"}]}, stages=[short_rl_stage()])
    done = run_mmrl("train", config, "--verify-resume", "--steps", 4)
    assert done.code == 1, done
    assert "metrics.jsonl" in done.output
    assert "VERDICT: the resumed run is NOT the undisturbed one." in done.output
