"""Whole runs of a model with recurrent layers and with experts, with all that may be combined, to their exports.

The other families train, export and train on in test_export.py.
"""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from family_runs import family_runs
from harness import check_metrics_alike, check_records, metrics, reproducible_files, rl_stage, run_mmrl, succeed, write
from interrupts import train_until_signal
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from zoom_runs import zoom_config

from mmrl.rollout.engine_sampler import EngineSampler

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return family_runs(tmp_path_factory, "qwen3_5_moe")


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [record for record in metrics(run_dir) if record["stage"] == "rl" and "learner/loss" in record]


def test_a_run_with_tools_replay_partial_rollouts_and_rethinking_uses_all_of_them(runs):
    cold = [record["learner/loss"] for record in metrics(runs / "base") if "learner/loss" in record][:50]
    assert cold[-1] < cold[0] / 20  # each layer learns: with transformers' own initial values it would not so soon
    steps = steps_of(runs / "whole")
    assert len(steps) >= 3  # a step without any signal trains on none
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
    kept = check_records(runs / "whole")
    assert {"trained", "replayed"} <= {record["selection"]["status"] for record in kept}
    authors = []
    for record in kept:
        authors.append({segment["author"] for segment in record["segments"]})
    assert any({"environment", "forced"} <= of for of in authors)


def test_a_frozen_router_is_not_trained(runs):
    for record in steps_of(runs / "base"):
        assert 0.0 < record["policy/router_load_entropy"] <= 1.0
    checkpoint = max((runs / "base" / "checkpoints").iterdir())
    names = load_file(checkpoint / "model.safetensors").keys()
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names)
    assert not any(name.endswith("mlp.gate.weight") for name in names)


def test_stopped_run_of_a_family_resumes_byte_equal(runs, tmp_path, in_process):
    config = json.loads((runs / "whole.yaml").read_text())
    config["run"]["dir"] = str(tmp_path / "run")
    file = write(config, tmp_path / "run.yaml")
    train_until_signal(in_process, file, EngineSampler, "sync", 3, signal.SIGINT)
    succeed(in_process("train", file))
    assert reproducible_files(tmp_path / "run") == reproducible_files(runs / "whole")


def test_its_export_is_the_base_model_with_its_adapter(runs, tmp_path, in_process):
    succeed(in_process("export", runs / "whole", "--merge-lora", "--out", tmp_path / "merged"))
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


def test_its_evaluation_gives_the_verdicts_of_the_last_one_in_training(runs, tmp_path, in_process):
    data = runs / "questions" / "ten.jsonl"
    out = tmp_path / "out"
    succeed(in_process("eval", runs / "whole" / "model", "--benchmark", "counting", "--data", data, "--out", out))
    taken = max((runs / "whole" / "benchmarks" / "counting").iterdir())
    assert (out / "verdicts.jsonl").read_bytes() == (taken / "verdicts.jsonl").read_bytes()


def test_two_processes_under_zero3_do_what_one_does(runs, tmp_path, in_process):
    """They sample, learn, save and export weights that neither of them holds whole."""
    pytest.importorskip("deepspeed")
    base = runs / "base" / "model"

    def config(name, **sections):
        made = {**zoom_config(tmp_path / name), **sections}
        made["model"] |= {"from_scratch": None, "path": str(base)}
        made["evaluation"] = {"max_new_tokens": 6, "batch_size": 8}
        # The bonus moves the weights, whatever is rewarded.
        means = {"sampling": {"max_new_tokens": 6}, "loss": {"entropy": {"coef": 0.1}}, "optimizer": {"lr": 1e-3}}
        made["stages"] = [rl_stage(steps=2, ppo_epochs=1, group_size=2, **means)]
        return write(made, tmp_path / f"{name}.yaml")

    assert in_process("train", config("alone")).code == 0
    succeed(
        run_mmrl("train", config("shared", deepspeed={"zero_stage": 3, "param_persistence_elements": 0}), "--nproc", 2)
    )
    check_metrics_alike(*(metrics(tmp_path / name) for name in ("shared", "alone")))
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("shared", "alone"))
    before = load_file(base / "model.safetensors")
    assert ours.keys() == theirs.keys() == before.keys() - {"mtp.fc.weight"}
    assert max(float((tensor - before[name]).abs().max()) for name, tensor in theirs.items()) > 1e-3
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-5, msg=name)
