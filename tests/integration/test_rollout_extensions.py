"""Engines, rollout steps and tools from a user's file: the examples in real runs, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import Command, counting, experiment, metrics, refuse, rl_stage, sft_stage, succeed, write
from zoom_runs import check_all_occurred, logprob_checks

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN_ENGINE = {"rollout": {"engine": {"fn": "./mine.py:make"}}}
OWN_STEP = {"steps": [{"fn": "./mine.py:make"}]}


def write_config(folder: Path, *, steps: list[dict[str, Any]] | None = None, **sections: Any) -> Path:
    """A config beside the examples; `steps` are the rollout steps after the first."""
    for example in ("rollout_engine.py", "rollout_step.py", "tool.py"):
        shutil.copy(EXAMPLES / example, folder)
    rl = rl_stage(steps=2, **({"rollout_steps": [{"kind": "generate"}, *steps]} if steps else {}))
    config = experiment(folder / "run", stages=[sft_stage(steps=2), rl], **sections)
    return write(config, folder / "tiny.yaml")


def check_refused(folder: Path, in_process: Command, message: str, *overrides: str, **sections: Any) -> str:
    """Check that a run ends with `message` and without a traceback, and return all that it wrote."""
    done = in_process("train", write_config(folder, **sections), *overrides)
    assert done.code == 2
    assert message in " ".join(done.errors.split())
    assert "Traceback" not in done.errors
    return done.output + done.errors


def test_run_samples_with_the_engine_of_the_example(tmp_path, in_process):
    engine = {"fn": "./rollout_engine.py:make_engine", "args": {"max_batch_tokens": 64}}
    succeed(in_process("train", write_config(tmp_path, rollout={"engine": engine})))
    log = (tmp_path / "run" / "engine" / "speed.csv").read_text().splitlines()
    assert len(log) >= 2  # one for each step of the RL stage
    assert all(int(line.split(",")[0]) > 0 for line in log)
    # An engine that is not the learner's own model is checked against it as the stage starts.
    assert 0 <= max(logprob_checks(tmp_path / "run")) < 1e-4


ENGINE = """
from mmrl.rollout.engines.base import RolloutEngine
from mmrl.rollout.engines.hf import HfEngine

class Engine(RolloutEngine):
    def __init__(self, context):
        self.generator = HfEngine(context.policy, context.processor, copy_policy=True)
        self.log = context.work_dir.parent / "calls.txt"

    def generate(self, requests, sampling_params, *, record_routes):
        self.note("generate")
        return self.generator.generate(requests, sampling_params, record_routes=record_routes)

    def load_weights(self, weights):
        self.note(f"load {len(list(weights)) > 0}")
        self.generator.load_weights(weights)

    def logits_dtypes(self):
        return {"float16"}

    def sleep(self):
        self.note("sleep")

    def close(self):
        self.note("close")

    def note(self, call):
        with self.log.open("a") as file:
            file.write(call + "\\n")

def make(context):
    return Engine(context)
"""


def test_own_engine_gets_weights_once_a_version_and_sleeps_while_the_learner_works(tmp_path, in_process):
    (tmp_path / "mine.py").write_text(ENGINE)
    succeed(in_process("train", write_config(tmp_path, **OWN_ENGINE)))
    calls = (tmp_path / "run" / "calls.txt").read_text().splitlines()
    # Each stage has two steps, and so two versions of its weights; the test samples are answered before and after.
    rl_calls = calls[calls.index("load True") :]
    assert calls.count("sleep") == 4 and calls[-1] == "close"
    assert calls.count("load True") <= 1 + 4
    assert all(rl_calls[n - 1] == "generate" for n, call in enumerate(rl_calls) if call == "sleep" and n > 1)
    assert 0 <= max(logprob_checks(tmp_path / "run")) < 1e-4


def test_run_applies_the_step_of_the_example(tmp_path, in_process):
    step = {"fn": "./rollout_step.py:make_step", "args": {"max_new_tokens": 3}, "max_added_tokens": 24}
    succeed(in_process("train", write_config(tmp_path, steps=[step])))
    check_all_occurred(metrics(tmp_path / "run"), "force_answer/count")
    explained = in_process("explain", tmp_path / "tiny.yaml")
    assert "fn ./rollout_step.py:make_step" in " ".join(explained.output.split())


OWN_TEST_DATA = """
from mmrl_datasets.generators.scenes import counting
from mmrl import RewardValue, reward

def rows(context):
    return counting(context, split="test", size=6, image_px=32)

@reward(name="filled")
def filled(response, sample):
    return RewardValue(float(bool(response.text)), "")
"""


def test_an_evaluation_finds_the_files_of_the_run_whatever_the_working_directory(tmp_path, in_process, monkeypatch):
    (tmp_path / "own.py").write_text(OWN_TEST_DATA)
    step = {"fn": "./rollout_step.py:make_step", "args": {"max_new_tokens": 3}, "max_added_tokens": 24}
    tools = {"kind": "tools", "tools": [{"fn": "./tool.py:calculate"}]}
    sections = {
        "rollout": {"engine": {"fn": "./rollout_engine.py:make_engine", "args": {"max_batch_tokens": 64}}},
        "rewards": {"terms": [{"fn": "./own.py:filled"}]},
        "evaluation": {"max_new_tokens": 6, "rollout_steps": [{"kind": "generate"}, tools, step]},
        "data": {"train": [counting("train", 12)], "test": [{"fn": "./own.py:rows"}]},
    }
    assert in_process("train", write_config(tmp_path, **sections)).code == 0
    rewards = {task["task"]: task["after"] for task in json.loads((tmp_path / "run/summary.json").read_text())["tasks"]}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for model in ("run", "run/model"):
        out = elsewhere / Path(model).name
        succeed(in_process("eval", tmp_path / model, "--benchmark", "run:test", "--out", out))
        assert json.loads((out / "report.json").read_text())["rewards"] == rewards
    # A copy that knows no folder of its config starts from the working directory, or from `--data`.
    shutil.copytree(tmp_path / "run/model", tmp_path / "copy")
    asked = ("eval", tmp_path / "copy", "--benchmark", "run:test", "--out", elsewhere / "copied")
    refuse(in_process(*asked), "own.py", str(elsewhere))
    assert in_process(*asked, "--data", tmp_path).code == 0


def test_run_accepts_the_tool_of_the_example(tmp_path, in_process):
    tools = {"kind": "tools", "tools": [{"fn": "./tool.py:calculate", "args": {"digits": 3}}]}
    succeed(in_process("train", write_config(tmp_path, steps=[tools])))
    assert all("tools/calls" in record for record in metrics(tmp_path / "run") if "rollout/truncated_frac" in record)


STEP = """
from dataclasses import replace
from mmrl.types import Author, Segment

def make(context, *, breaks: str):
    def step(batch, *, step):
        first = batch.groups[0][0]
        segment = first.segments[0]
        changed = {
            "type": None,
            "groups": replace(batch, groups=batch.groups[1:]),
            "record": put(batch, replace(first, segments=(replace(segment, version=7),))),
            "lengths": put(batch, replace(first, segments=(replace(segment, logprobs=()),))),
            "index": put(batch, replace(first, index=1)),
            "empty": put(batch, replace(first, segments=())),
        }
        return changed[breaks]  # KeyError for another word
    return step

def put(batch, rollout):
    return replace(batch, groups=((rollout, *batch.groups[0][1:]), *batch.groups[1:]))
"""


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        ("type", "rollout step make must return a RolloutBatch; it returned None"),
        ("groups", "was given 4 groups and returned 3"),
        ("record", "a segment by POLICY has another author, version or log-probabilities than before"),
        ("lengths", "tokens and 0 log-probabilities; write one for each token"),
        ("index", "returned two rollouts of one group with one index: [1, 1, 2, 3]"),
        ("empty", "none of its segments is by POLICY"),
        ("python", "rollout step './mine.py:make' raised KeyError: 'python' ("),
    ],
)
def test_step_that_breaks_the_rules_ends_the_run(tmp_path, in_process, breaks, message):
    (tmp_path / "mine.py").write_text(STEP)
    check_refused(tmp_path, in_process, message, steps=[{"fn": "./mine.py:make", "args": {"breaks": breaks}}])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"steps": [{"fn": "./tool.py:calculate"}]}, "a rollout step is called with (context)"),
        ({"steps": [{"max_turns": 3}]}, "rollout_steps.1.kind: missing"),
        ({"rollout": {"engine": {"args": {}}}}, "rollout.engine.fn: missing"),
        ({"rollout": {"engine": "vlm"}}, "rollout.engine: must be 'hf', 'vllm' or 'vllm_server', got the text 'vlm'"),
    ],
)
def test_invalid_engine_or_step_is_refused_before_training(tmp_path, in_process, sections, message):
    check_refused(tmp_path, in_process, message, **sections)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sections", "code", "message"),
    [
        (OWN_STEP, "def make(context): return lambda batch: batch\n", "it is called as __call__(batch, step=...), but"),
        (
            OWN_ENGINE,
            ENGINE.replace("load_weights(self, weights)", "load_weights(self)"),
            "it is called as load_weights(weights), but",
        ),
        (OWN_ENGINE, "def make(context):\n    return 3\n", "returned 3, which has no method 'generate'"),
        (OWN_ENGINE, ENGINE.replace("(RolloutEngine)", ""), "which has no attribute 'max_model_len'; set it"),
    ],
)
def test_function_that_makes_no_engine_or_step_is_refused_before_a_step(tmp_path, in_process, sections, code, message):
    (tmp_path / "mine.py").write_text(code)
    written = check_refused(tmp_path, in_process, message, **sections)
    assert "mine.py:" in written and "rl 1/" not in written


def test_own_engine_that_rounds_logits_is_refused_for_a_float32_output_layer(tmp_path, in_process):
    (tmp_path / "mine.py").write_text(ENGINE)
    message = "model.float32_output_layer: rollout.engine ./mine.py:make computes logits in float16"
    check_refused(tmp_path, in_process, message, "model.float32_output_layer=true", **OWN_ENGINE)
