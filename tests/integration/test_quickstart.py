"""The first command of a newcomer, with few steps and samples; and every config there is."""

import json
from pathlib import Path

import pytest
from harness import Done, counting, experiment, metrics, run_mmrl, sft_stage, succeed, write

from mmrl.config import LoadedConfig, load_config
from mmrl.utils.plugin_args import read_plugin_options, validate_args
from mmrl.utils.plugins import load_function
from mmrl_rewards.contract import bind

CONFIGS = Path(__file__).parents[2] / "configs"
TASKS = ["count", "ground", "read"]
SIZES = {"train": 64, "validation": 8, "test": 16}
FEW = [f"data.{part}.{index}.args.size={size}" for part, size in SIZES.items() for index in range(len(TASKS))]
SETTINGS = [path for path in sorted(CONFIGS.rglob("*.yaml")) if "overlays" not in path.parts]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory) -> tuple[Done, Path]:
    """`mmrl train configs/quickstart.yaml` on few samples: how it ended, and its run directory."""
    folder = tmp_path_factory.mktemp("quickstart")
    done = run_mmrl("train", CONFIGS / "quickstart.yaml", "--steps", 2, *FEW, cwd=folder, fresh=True)
    return done, folder / "runs" / "quickstart"


@pytest.mark.slow
def test_quickstart_runs_and_shows_the_table(quickstart):
    done, run_dir = quickstart
    assert done.code == 0, done.errors
    assert not done.errors
    assert "cold 2/2" in done.output
    assert "rl 2/2" in done.output
    table = done.output.partition("Held-out reward before stage rl and at the end")[2]
    assert [task for task in TASKS if f"\n  {task} " in table] == TASKS
    assert f"Model: {run_dir.relative_to(run_dir.parents[1])}/model" in done.output


@pytest.mark.slow
def test_the_run_directory_holds_everything(quickstart):
    _, run_dir = quickstart
    assert {path.name for path in run_dir.iterdir()} == {
        *("checkpoints", "config.yaml", "data", "data_digests.json", "events.jsonl", "manifest.json", "metrics.jsonl"),
        *("model", "processor", "rollouts", "status.json", "summary.json", "timings.jsonl"),
    }
    config = load_config(run_dir / "config.yaml").config
    assert config.run.name == "quickstart"
    steps = [(record["stage"], record["step"]) for record in metrics(run_dir) if "learner/lr" in record]
    assert steps == [("cold", 1), ("cold", 2), ("rl", 1), ("rl", 2)]
    rollouts = config.stages[1].prompts_per_step * config.stages[1].group_size
    assert (run_dir / "rollouts" / "rl-000001.jsonl").read_bytes().count(b"\n") == rollouts
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert set(manifest["data"]) == {"train", "validation", "test"}


@pytest.mark.slow
def test_the_summary_says_what_the_table_says(quickstart):
    done, run_dir = quickstart
    summary = json.loads((run_dir / "summary.json").read_text())
    assert [task["task"] for task in summary["tasks"]] == TASKS
    for task in summary["tasks"]:
        assert task["n"] == SIZES["test"]
        assert 0.0 <= task["before"] <= 1.0
        assert 0.0 <= task["after"] <= 1.0
        low, high = task["ci"]
        assert low <= task["after"] - task["before"] <= high
        (row,) = [line for line in done.output.splitlines() if line.split()[:2] == [task["task"], str(task["n"])]]
        assert f"{task['before']:.3f} [" in row
        assert f"{task['after']:.3f} [" in row


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_config_loads_and_names_functions_that_exist(path):
    loaded: LoadedConfig = load_config(path)
    config, base = loaded.config, path.parent
    for term in config.rewards.terms:
        bind(load_function(term.fn, base, role="function"), term.args)
    for origin in (*config.data.train, *config.data.validation, *config.data.test):
        source = load_function(origin.fn, base, role="function")
        assert callable(source)
        validate_args(origin.fn, read_plugin_options(source, skip=1), origin.args)


def test_one_held_out_sample_has_a_reward_and_no_interval(tmp_path, in_process):
    data = {"train": [counting("train", 4)], "test": [counting("test", 1)]}
    config = experiment(tmp_path / "run", data=data, stages=[sft_stage(steps=1)])
    succeed(in_process("train", write(config, tmp_path / "one.yaml")))
    (task,) = json.loads((tmp_path / "run" / "summary.json").read_text())["tasks"]
    assert task["n"] == 1
    assert task["ci"] == [None, None]
