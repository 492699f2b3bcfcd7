"""The recipes for real hardware run with a tiny model in place of theirs."""

import json
from pathlib import Path

import pytest
from harness import TINY, metrics, run_mmrl, succeed

from mmrl.config import load_config

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"
PROCESSES = {
    "qwen2_5_vl_3b_lora_24gb": 1,
    "qwen2_5_vl_3b_full_80gb": 1,
    "qwen2_5_vl_7b_8x80gb": 2,
    "qwen2_5_vl_72b_multi_node": 2,
    "qwen3_5_4b_lora_80gb": 1,
    "qwen3_5_4b_full_8x80gb": 1,
    "qwen3_vl_30b_a3b_8x80gb": 2,
}
# A recurrent layer and one that attends; heads of 32 channels, a quarter of which is rotated.
HYBRID = {**TINY, "family": "qwen3_5", "language": {**TINY["language"], "num_layers": 2}}
MODELS = {
    "qwen3_5_4b_lora_80gb": HYBRID,
    "qwen3_5_4b_full_8x80gb": HYBRID,
    "qwen3_vl_30b_a3b_8x80gb": {**TINY, "family": "qwen3_vl_moe"},
}


def test_each_recipe_for_hardware_is_tried():
    assert {path.stem for path in RECIPES.glob("qwen*.yaml")} == PROCESSES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
def test_a_recipe_runs_with_a_tiny_model(name, tmp_path):
    config = RECIPES / f"{name}.yaml"
    stage = load_config(config).config.stages[0].name
    if load_config(config).config.deepspeed:
        pytest.importorskip("deepspeed")
    boxes = {"fn": "mmrl_datasets.generators.scenes:grounding", "args": {"split": "train", "size": 8, "image_px": 32}}
    overrides = {
        "model.path": None,
        "model.from_scratch": MODELS.get(name, TINY),
        "model.chat": {},  # the template of a tiny model has no options
        "model.min_pixels": 1024,
        "model.max_pixels": 1024,
        "data.train": [boxes],
        "rollout": {"engine": "hf"},
        f"stages.{stage}.prompts_per_step": 4,
        f"stages.{stage}.group_size": 2,
        f"stages.{stage}.sampling.max_new_tokens": 8,
        "response_format.thinking": "none",  # the boxes come without thoughts for a new tokenizer to learn from
        "run.cpu_threads": 1,
    }
    words = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    several = ["--nproc", PROCESSES[name]] if PROCESSES[name] > 1 else []
    succeed(run_mmrl("train", config, *words, *several, "--steps", 1, "--run-dir", tmp_path / "run"))
    assert any("learner/lr" in record for record in metrics(tmp_path / "run"))
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
