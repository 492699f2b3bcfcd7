"""`mmrl eval RUN --benchmark run:..` gives the rewards that training printed, to the last digit, of any rollouts."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import counting, experiment, metrics, rl_stage, run_mmrl, sft_stage, succeed, write
from zoom_runs import later_config

RETHINK = {
    "kind": "rethink",
    "correct": ["format"],
    "max_new_tokens": 6,
    "fraction": 0.5,
    "triggers": [{"text": " Wait."}, {"text": " Look again."}],
}
TERMS = [
    {"fn": "mmrl_rewards.format:tags", "name": "format"},
    {"fn": "mmrl_rewards.number:exact", "name": "digit", "weight": 2.0, "when": {"rollout.turns": [1]}},
    {"fn": "./rewards.py:length", "name": "rethought", "when": {"rollout.rethought": True}},
    {"fn": "./rewards.py:length", "name": "used", "weight": 0.5, "when": {"rollout.used_tool": True}},
    {"fn": "./rewards.py:length", "name": "shaping", "training_only": True},
    {"fn": "mmrl_rewards.look:area", "name": "area"},
    {"fn": "./rewards.py:abstains", "name": "abstains", "fallback": "stand_in", "schedule": {"points": [[0, 0.0]]}},
    {"fn": "./rewards.py:length", "name": "stand_in", "transform": {"clip": [0.0, 0.5]}},
]
REWARDS = '''
from mmrl import Unscorable
from mmrl_rewards import reward

@reward(name="length", low=0.0, high=1.0)
def length(response, sample) -> float:
    """A number that depends on the whole text."""
    return sum(map(ord, response.text)) % 97 / 97

@reward(name="abstains", low=0.0, high=1.0)
def abstains(response, sample) -> float:
    """Abstains from long texts."""
    if len(response.text) % 3:
        raise Unscorable("odd")
    return length(response, sample)
'''


def check_evaluation(folder: Path, config: dict[str, Any], task: str, in_process: Any) -> list[dict[str, Any]]:
    """Train; check that `run:test` and `run:validation` say what training said last. Returns its records."""
    (folder / "rewards.py").write_text(REWARDS)
    succeed(run_mmrl("train", write(config, folder / "tiny.yaml")))
    records = metrics(folder / "run")
    for split in ("test", "validation"):
        told = [record[f"{split}/{task}"] for record in records if f"{split}/{task}" in record]
        assert len(told) > 1
        out = folder / split
        succeed(in_process("eval", folder / "run", "--benchmark", f"run:{split}", "--out", out))
        assert json.loads((out / "report.json").read_text())["rewards"] == {task: told[-1]}
    return records


@pytest.mark.slow
def test_forced_rethinking_at_a_temperature(tmp_path, in_process):
    stages = [sft_stage(steps=6, optimizer={"lr": 1.5e-2}), rl_stage(steps=2, validation={"every": 1})]
    config = experiment(
        tmp_path / "run",
        rewards={"terms": TERMS},
        evaluation=dict(max_new_tokens=6, batch_size=8, temperature=1.0, rollout_steps=[{"kind": "generate"}, RETHINK]),
        stages=stages,
    )
    config["data"]["validation"] = [counting("validation", 12)]
    records = check_evaluation(tmp_path, config, "count", in_process)
    attempted = [record["test/rethink/attempted"] for record in records if "test/count" in record]
    assert 0 < attempted[-1] < 6


@pytest.mark.slow
def test_tools_and_forced_rethinking(tmp_path, zoomed, in_process):
    config = later_config(tmp_path / "run", zoomed / "model")
    config["rewards"] = {"terms": TERMS}
    config["evaluation"]["rollout_steps"] = [*config["evaluation"]["rollout_steps"], RETHINK]
    config["data"]["validation"] = config["data"]["test"]
    config["stages"][1] |= {"steps": 2, "validation": {"every": 1}}
    records = check_evaluation(tmp_path, config, "corner", in_process)
    (_, after) = [record for record in records if "test/corner" in record]
    assert after["test/tools/media_shown"] > 0 and after["test/rethink/attempted"] > 0
