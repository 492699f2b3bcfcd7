"""Whole runs of models with recurrent layers and with experts, with all that may be combined, to their exports."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TINY, Command, alike, contents, metrics, mmrl, questions, rl_stage, shared, write
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_async_rollouts_run import strike
from test_zoom_tool import in_parts, zooming
from transformers import AutoModelForImageTextToText

from mmrl.rollout.engine_sampler import EngineSampler

pytestmark = pytest.mark.slow

NAMES = ("qwen3_5", "qwen3_vl_moe", "qwen3_5_moe")
TARGETS = {
    "qwen3_5": ["language.attention", "language.mlp"],
    "qwen3_vl_moe": ["language.attention", "language.experts"],
    "qwen3_5_moe": ["language.attention", "language.experts"],
}
# Sizes that vLLM runs on a CPU: heads of 32 channels, recurrent ones of 128. The first layer is recurrent.
SMALL = {**TINY["language"], "num_layers": 2, "num_heads": 1, "num_kv_heads": 1, "vocab_size": 400}
SMALL = {**SMALL, "linear_head_dim": 128}


def base_config(run_dir: Path, family: str) -> dict[str, Any]:
    """Imitation until the policy zooms by itself, then a step or two of reinforcement, of all weights."""
    config = zooming(run_dir)
    config["model"] |= {"from_scratch": {**TINY, "family": family, "language": SMALL}}
    config["model"]["freeze_router"] = family.endswith("_moe")
    cold, rl = config["stages"]
    cold["steps"], rl["steps"] = 50, 2
    return config


def adapter_config(run_dir: Path, base: Path, family: str, data: Path) -> dict[str, Any]:
    """An adapter, by responses in parts that zoom, are made to look again and are learned from once more."""
    config = in_parts(run_dir, base)
    config["model"] |= {"lora": {"rank": 4, "targets": TARGETS[family]}}
    config["evaluation"]["benchmarks"] = [{"name": "counting", "data": [str(data)]}]
    _, rl = config["stages"]
    rl |= {"steps": 4, "ppo_epochs": 2}
    # On some CPUs no rollout of the four steps is right. Their lengths differ everywhere, so there is a signal.
    length = {"fn": "mmrl_rewards.length:surrogate", "weight": 0.1, "args": {"max_tokens": 64}}
    config["rewards"]["terms"] += [length]
    if family.endswith("_moe"):
        rl["loss"] = {**rl["loss"], "routing_replay": "learner"}
    return config


@pytest.fixture(scope="module", params=NAMES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_runs(tmp_path_factory, request.param)


def family_runs(tmp_path_factory: pytest.TempPathFactory, family: str) -> Path:
    """A folder with two runs: `base`, and `whole`, which trains an adapter on the model of the first."""

    def make(folder: Path) -> None:
        done = mmrl("train", write(base_config(folder / "base", family), folder / "base.yaml"))
        assert done.code == 0, done.errors
        # As in released folders of Qwen3.5; transformers has no layer for them.
        file = folder / "base" / "model" / "model.safetensors"
        save_file({**load_file(file), "mtp.fc.weight": torch.ones(2, 2)}, file, metadata={"format": "pt"})
        data = questions(folder / "questions")
        config = adapter_config(folder / "whole", folder / "base" / "model", family, data)
        done = mmrl("train", write(config, folder / "whole.yaml"))
        assert done.code == 0, done.errors
        assert "1 weights for predicting several tokens" in done.output

    return shared(tmp_path_factory, f"runs-{family}", make)


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [record for record in metrics(run_dir) if record["stage"] == "rl" and "learner/loss" in record]


def test_everything_is_done_at_once(runs: Path) -> None:
    cold = [record["learner/loss"] for record in metrics(runs / "base") if "learner/loss" in record][:50]
    assert cold[-1] < cold[0] / 20  # each layer learns: with transformers' own initial values it would not so soon
    steps = steps_of(runs / "whole")
    assert len(steps) == 4
    for name in (
        "rollout/unfinished_groups",
        "rollout/resumed_rollouts",
        "tools/media_shown",
        "rethink/attempted",
        "replay/frac",
        "learner/grad_norm/language",
    ):
        assert sum(record.get(name, 0.0) for record in steps) > 0, name
    # The sampler's caches gave the log-probs that the learner finds without them.
    assert max(record["rollout/logprob_diff_mean"] for record in steps_of(runs / "base")) < 1e-4
    kept = [json.loads(line) for file in (runs / "whole" / "rollouts").glob("rl-*") for line in file.open()]
    authors = []
    for record in kept:
        authors.append({segment["author"] for segment in record["segments"]})
    assert any({"environment", "forced"} <= of for of in authors)


def test_a_frozen_router_is_no_weight_that_is_trained(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = family_runs(tmp_path_factory, "qwen3_vl_moe") / "base"
    for record in steps_of(base):
        assert 0.0 < record["policy/router_load_entropy"] <= 1.0
    checkpoint = max((base / "checkpoints").iterdir())
    names = load_file(checkpoint / "model.safetensors").keys()
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names)
    assert not any(name.endswith("mlp.gate.weight") for name in names)


def test_such_a_run_goes_on_as_if_it_had_never_stopped(
    runs: Path, tmp_path: Path, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((runs / "whole.yaml").read_text())
    config["run"]["dir"] = str(tmp_path / "run")
    file = write(config, tmp_path / "run.yaml")
    with monkeypatch.context() as patched:
        strike(patched, EngineSampler, "sync", 3, signal.SIGINT)
        assert here("train", file).code == 128 + signal.SIGINT
    done = here("train", file)
    assert done.code == 0, done.errors
    assert contents(tmp_path / "run") == contents(runs / "whole")


def test_its_export_is_the_base_model_with_its_adapter(runs: Path, tmp_path: Path, here: Command) -> None:
    done = here("export", runs / "whole", "--merge-lora", "--out", tmp_path / "merged")
    assert done.code == 0, done.errors
    ids = torch.tensor([[3, 40, 41, 300, 301, 7]])
    ours, theirs = (load(folder) for folder in (tmp_path / "merged", runs / "whole" / "model"))
    bare = load(runs / "base" / "model")
    with torch.no_grad():
        logits, before = ours(input_ids=ids).logits, bare(input_ids=ids).logits
        assert torch.equal(logits, theirs(input_ids=ids).logits)
        adapted = PeftModel.from_pretrained(bare, str(runs / "whole" / "adapter")).eval()(input_ids=ids).logits
    assert (logits - before).abs().max() > 1e-2
    torch.testing.assert_close(logits, adapted, rtol=0, atol=1e-4)
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "lacks the 1 weights for predicting several tokens" in card


def load(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def test_its_evaluation_gives_the_verdicts_of_the_last_one_in_training(
    runs: Path, tmp_path: Path, here: Command
) -> None:
    data = runs / "questions" / "ten.jsonl"
    out = tmp_path / "out"
    done = here("eval", runs / "whole" / "model", "--benchmark", "counting", "--data", data, "--out", out)
    assert done.code == 0, done.errors
    taken = max((runs / "whole" / "benchmarks" / "counting").iterdir())
    assert (out / "verdicts.jsonl").read_bytes() == (taken / "verdicts.jsonl").read_bytes()


@pytest.mark.parametrize("family", NAMES)
def test_two_processes_under_zero3_do_what_one_does(
    family: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, here: Command
) -> None:
    """They sample, learn, save and export weights that neither of them holds whole."""
    pytest.importorskip("deepspeed")
    base = family_runs(tmp_path_factory, family) / "base" / "model"

    def config(name: str, **sections: Any) -> Path:
        made = {**zooming(tmp_path / name), **sections}
        made["model"] |= {"from_scratch": None, "path": str(base)}
        made["evaluation"] = {"max_new_tokens": 6, "batch_size": 8}
        # The bonus moves the weights, whatever is rewarded.
        means = {"sampling": {"max_new_tokens": 6}, "loss": {"entropy": {"coef": 0.1}}, "optimizer": {"lr": 1e-3}}
        made["stages"] = [rl_stage(steps=2, ppo_epochs=1, group_size=2, **means)]
        return write(made, tmp_path / f"{name}.yaml")

    assert here("train", config("alone")).code == 0
    done = mmrl("train", config("shared", deepspeed={"zero_stage": 3, "param_persistence_elements": 0}), "--nproc", 2)
    assert done.code == 0, done.errors
    alike(*(metrics(tmp_path / name) for name in ("shared", "alone")))
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("shared", "alone"))
    before = load_file(base / "model.safetensors")
    assert ours.keys() == theirs.keys() == before.keys() - {"mtp.fc.weight"}
    assert max(float((tensor - before[name]).abs().max()) for name, tensor in theirs.items()) > 1e-3
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
