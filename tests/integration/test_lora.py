"""A run that trains an adapter resumes exactly, keeps little, and leaves a merged model with the adapter beside it."""

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from mmrl.checkpoint import find_latest

pytestmark = pytest.mark.slow

LORA = {"rank": 4, "targets": ["language.attention", "language.mlp", "projector.mlp"], "dropout": 0.1}
PIXELS = {"dtype": "float32", "device": "cpu", "min_pixels": 1024, "max_pixels": 1024}


def adapting(run_dir: Path, base: Path) -> dict[str, Any]:
    """Two supervised steps, then GRPO whose KL reference is the adapter after them."""
    rates = {**harness.scheduled(3e-3, 4), "lr_by_component": {"projector": 1e-3}}
    return harness.experiment(
        run_dir,
        model={**PIXELS, "path": str(base), "lora": LORA, "gradient_checkpointing": ["language"]},
        data={"train": [harness.counting("train", 12)], "test": [harness.counting("test", 3)]},
        stages=[harness.sft_stage(steps=2, optimizer=rates), harness.rl_stage(steps=4, optimizer=rates)],
    )


def reference_kl(run_dir: Path) -> list[float]:
    return [
        record["policy/reference_kl_nats"]
        for record in harness.metrics(run_dir)
        if "policy/reference_kl_nats" in record
    ]


@pytest.fixture(scope="module")
def base(whole) -> Path:
    """A model that has learned a little."""
    return whole / "model"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, base) -> Path:
    """The directory of a run that was not interrupted."""
    return harness.undisturbed(tmp_path_factory, "adapted", lambda run_dir: adapting(run_dir, base))


def test_stopped_run_ends_like_the_whole_one(adapted, base, tmp_path, in_process):
    config = harness.write(adapting(tmp_path / "run", base), tmp_path / "lora.yaml")
    done = harness.run_mmrl("train", config, fault=("mmrl.learner.learner:PolicyLearner.step", 2 + 2, "SIGINT"))
    assert done.code == 128 + signal.SIGINT, done.errors
    assert in_process("train", config).code == 0
    assert harness.reproducible_files(tmp_path / "run") == harness.reproducible_files(adapted)
    ours, theirs = (run / "adapter" / "adapter_model.safetensors" for run in (tmp_path / "run", adapted))
    assert ours.read_bytes() == theirs.read_bytes()


def test_deepspeed_run_resumes_with_more_or_fewer_ranks(base, tmp_path, in_process):
    """Under ZeRO-3 two begin, one continues, two end; one without DeepSpeed ends with the same weights."""
    pytest.importorskip("deepspeed")

    def config(name, **sections):
        changed = {**adapting(tmp_path / name, base), "checkpoints": {"every": 50, "keep_last": 2}, **sections}
        changed["model"] = {**changed["model"], "lora": {**LORA, "dropout": 0.0}}  # each rank draws its own
        changed["stages"][1] |= {"steps": 12}  # so many that none ends before the signal
        return harness.write(changed, tmp_path / f"{name}.yaml")

    assert in_process("train", config("alone")).code == 0
    shared = config("shared", deepspeed={"zero_stage": 3})
    done = harness.train_and_signal(shared, tmp_path / "shared", signal.SIGTERM, rank=None, lines=5)
    assert done.code == 128 + signal.SIGTERM, done.errors
    done = harness.run_mmrl("train", shared, fault=("mmrl.learner.learner:PolicyLearner.step", 2, "SIGINT"))
    assert done.code == 128 + signal.SIGINT, done.errors
    harness.succeed(harness.run_mmrl("train", shared, "--nproc", 2))
    harness.check_metrics_alike(harness.metrics(tmp_path / "shared"), harness.metrics(tmp_path / "alone"))
    ours, theirs = (load_file(tmp_path / n / "adapter" / "adapter_model.safetensors") for n in ("shared", "alone"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


def test_only_trained_weights_are_saved_and_measured(adapted):
    checkpoint = find_latest(adapted / "checkpoints", pytest.fail)
    assert checkpoint is not None
    for file in (checkpoint / "model.safetensors", adapted / "reference_weights" / "rl" / "model.safetensors"):
        assert all("lora_" in name for name in load_file(file))
    steps = [record for record in harness.metrics(adapted) if "policy/reference_kl_nats" in record]
    assert max(step["groups/nonzero_advantage_frac"] for step in steps) > 0  # there was something to learn
    assert steps[-1]["policy/reference_kl_nats"] > 1e-4
    assert steps[-1]["learner/grad_norm/vision"] == 0.0
    assert min(steps[-1][f"learner/grad_norm/{role}"] for role in ("projector", "language")) > 0.0


def test_first_stage_saves_no_reference_weights(base, tmp_path, in_process):
    config = adapting(tmp_path / "run", base)
    config["stages"] = config["stages"][1:]
    done = harness.succeed(in_process("train", harness.write(config, tmp_path / "lora.yaml")))
    assert re.search(r"^ *vision +13 +[\d,]+ +0 +float32 *$", done.output, re.MULTILINE), done.output
    assert re.search(r"^ *projector +9 +[\d,]+ +[1-9][\d,]* +float32 +0.001 *$", done.output, re.MULTILINE)
    assert not (tmp_path / "run" / "reference_weights").exists()
    divergences = reference_kl(tmp_path / "run")
    assert len(divergences) == 4 and max(divergences) > 1e-4


def test_resuming_on_another_base_model_is_refused(base, tmp_path, in_process):
    mine = Path(shutil.copytree(base, tmp_path / "base"))
    config = harness.write(adapting(tmp_path / "run", mine), tmp_path / "lora.yaml")
    assert in_process("train", config).code == 0
    shutil.rmtree(tmp_path / "run" / "model")  # as if it had been stopped before its last act
    model = AutoModelForImageTextToText.from_pretrained(mine)
    with torch.no_grad():
        model.model.visual.merger.ln_q.weight.mul_(1.01)
    model.save_pretrained(mine)
    done = in_process("train", config)
    harness.refuse(done, "was saved from another model: the weights that are not trained differ. Restore model.path")


def test_export_is_the_base_model_with_its_adapter(adapted, base):
    described = json.loads((adapted / "adapter" / "adapter_config.json").read_text())
    assert (described["r"], described["base_model_name_or_path"]) == (4, str(base))
    merged = AutoModelForImageTextToText.from_pretrained(adapted / "model").eval()
    bare = AutoModelForImageTextToText.from_pretrained(base).eval()
    ids = torch.tensor([[3, 40, 41, 300, 301, 7]])
    with torch.no_grad():
        ours, before = merged(input_ids=ids).logits, bare(input_ids=ids).logits
        theirs = PeftModel.from_pretrained(bare, str(adapted / "adapter")).eval()(input_ids=ids).logits
    assert (ours - before).abs().max() > 1e-2
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_run_is_exported_as_an_adapter_or_merged(adapted, tmp_path, in_process):
    for folder, options in (("adapter", []), ("model", ["--merge-lora"])):
        harness.succeed(in_process("export", adapted, *options, "--out", tmp_path / folder))
        ours, theirs = (
            {path.name: path.read_bytes() for path in at.iterdir()} for at in (tmp_path / folder, adapted / folder)
        )
        assert ours == theirs
    assert "PeftModel" in (tmp_path / "adapter" / "README.md").read_text()


def test_later_stage_may_use_the_base_model_as_reference(base, tmp_path, in_process):
    """Its first step is as far from the base model as the supervised steps led, and not at its own start."""
    config = adapting(tmp_path / "run", base)
    imitate, reinforce = config["stages"]
    config["stages"] = [imitate, {**reinforce, "steps": 1, "ppo_epochs": 1, "reference": {"init_from": "base"}}]
    assert in_process("train", harness.write(config, tmp_path / "base.yaml")).code == 0
    config["stages"][1].pop("reference")
    config["run"]["dir"] = str(tmp_path / "other")
    assert in_process("train", harness.write(config, tmp_path / "stage.yaml")).code == 0
    # What is left of the second is the adapter's dropout.
    assert reference_kl(tmp_path / "run")[0] > 10 * reference_kl(tmp_path / "other")[0]
    assert not (tmp_path / "run" / "reference_weights").exists()
    assert (tmp_path / "other" / "reference_weights" / "rl").is_dir()
