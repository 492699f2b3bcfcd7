"""The forced-rethinking variant of the quickstart, a few steps of it: cold start, reinforcement, and the table."""

from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest
from harness import metrics, succeed
from tool_modules import load_tool

CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = ("data.train.0.args.size=16", "data.validation.0.args.size=8", "data.test.0.args.size=8")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("rethink_curves")


def test_cold_start_and_rl_run_and_the_table_reads_them(in_process, tool, tmp_path):
    cold, rl = tmp_path / "cold", tmp_path / "rl"
    few = ("stages.cold.steps=8", "stages.cold.prompts_per_step=8", "stages.cold.validation.every=4")
    succeed(in_process("train", CONFIGS / "rethink_cold.yaml", *SIZES, *few, "--run-dir", cold))
    few = ("stages.rl.steps=2", "stages.rl.prompts_per_step=4", "stages.rl.validation.every=2")
    succeed(
        in_process("train", CONFIGS / "rethink.yaml", *SIZES, *few, f"model.path={cold / 'model'}", "--run-dir", rl)
    )
    tested = [record for record in metrics(rl) if "test/add" in record]
    assert len(tested) == 2
    for record in tested:
        assert tool.rethink_accuracy(record, 8).after_rethink == record["test/add"]
    assert tool.train_or_read("rethink.yaml", rl) == tool.rethink_accuracy(tested[-1], 8)
    assert fmean(tool.final_rewards(rl).values()) == tested[-1]["test/add"]
    assert tool.paired_improvement(tool.final_rewards(cold), tool.final_rewards(rl)).n == 8


def test_table_has_accuracy_before_and_after_rethinking(tool):
    moves = {
        "correct_to_correct": 20,
        "correct_to_incorrect": 5,
        "incorrect_to_correct": 35,
        "incorrect_to_incorrect": 40,
        "attempted": 100,
    }
    record = {f"test/rethink/{name}": count for name, count in moves.items()} | {"test/add": 0.55, "step": 3}
    assert tool.rethink_accuracy(record, 100) == pytest.approx((0.25, 0.55, 0.35, 0.05))
