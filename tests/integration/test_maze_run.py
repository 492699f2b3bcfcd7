"""The maze's configs, made small: an annotator is imitated in episodes, then GRPO plays; the tool reads such runs."""

import json
import re
import sys
from pathlib import Path

import pytest
from harness import metrics, succeed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import maze_curves  # noqa: E402

SMALL = ("data.train.0.args.size=12", "data.validation.0.args.size=6", "data.test.0.args.size=6", "model.dtype=float32")


def test_a_cold_start_and_both_kinds_of_credit_run_and_are_tabulated(tmp_path, in_process):
    cold = ("stages.cold.steps=2", "stages.cold.prompts_per_step=4", "stages.cold.validation.every=1")
    succeed(in_process("train", ROOT / "configs/maze_cold.yaml", *SMALL, *cold, "--run-dir", tmp_path / "cold"))
    told = [record for record in metrics(tmp_path / "cold") if "learner/loss" in record]
    assert [record["environment/episodes"] for record in told] == [4.0, 4.0]
    assert all(record["environment/turns"] >= 4 and record["environment/invalid"] == 0 for record in told)
    small = ("steps=2", "prompts_per_step=2", "group_size=4", "validation.every=1", "rollout_steps.2.every=1")
    words = [f"stages.rl.{word}" for word in small]
    for arm in maze_curves.ARMS:
        run = tmp_path / arm
        own = (f"model.path={tmp_path / 'cold/model'}", f"stages.rl.advantage.credit={arm}")
        succeed(in_process("train", ROOT / "configs/maze.yaml", *SMALL, *words, *own, "--run-dir", run))
        told = metrics(run)
        episodes = [record["environment/episodes"] for record in told if maze_curves.PROBE_KEY in record]
        assert episodes == [8.0, 8.0]  # those of the probe are not counted
        summary = json.loads((run / "summary.json").read_text())
        row = maze_curves.success_row(arm, 0, summary, told)
        assert re.fullmatch(
            rf"\| {arm} \| 0 \| 0\.\d+ \| 0\.\d+ \| \*\*[+-]0\.\d+\*\* \[.*\] \| 0\.\d+ \| -?0\.\d+ \|", row
        ), row
        steps, curve = maze_curves.curve_row(arm, 0, told)
        assert steps == [1, 2] and curve.count("|") == 5
