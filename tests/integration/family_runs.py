"""Runs of a model with recurrent layers and with experts, made once for all processes of pytest."""

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TINY, questions, run_mmrl, shared, succeed, write
from safetensors.torch import load_file, save_file
from zoom_runs import partial_config, zoom_config

# Sizes that vLLM runs on a CPU: heads of 32 channels, recurrent ones of 128. The first layer is recurrent.
SMALL = {**TINY["language"], "num_layers": 2, "num_heads": 1, "num_kv_heads": 1, "vocab_size": 400}
SMALL = {**SMALL, "linear_head_dim": 128}


def base_config(run_dir: Path, family: str) -> dict[str, Any]:
    """Imitation until the policy zooms by itself, then a step or two of reinforcement, of all weights."""
    config = zoom_config(run_dir)
    config["model"] |= {"from_scratch": {**TINY, "family": family, "language": SMALL}, "freeze_router": True}
    cold, rl = config["stages"]
    cold["steps"], rl["steps"] = 50, 2
    return config


def adapter_config(run_dir: Path, base: Path, data: Path) -> dict[str, Any]:
    """An adapter, by responses in parts that zoom, are made to look again and are learned from once more."""
    config = partial_config(run_dir, base)
    config["model"] |= {"lora": {"rank": 4, "targets": ["language.attention", "language.experts"]}}
    config["evaluation"]["benchmarks"] = [{"name": "counting", "data": [str(data)]}]
    config["logging"] = {"rollouts": {"every": 1}}  # which step replays depends on the CPU
    _, rl = config["stages"]
    rl |= {"steps": 4, "ppo_epochs": 2}
    # On some CPUs no rollout of the four steps is right. Their lengths differ everywhere, so there is a signal.
    length = {"fn": "mmrl_rewards.length:surrogate", "weight": 0.1, "args": {"max_tokens": 64}}
    config["rewards"]["terms"] += [length]
    rl["loss"] = {**rl["loss"], "routing_replay": "learner"}
    return config


def family_runs(tmp_path_factory: pytest.TempPathFactory, family: str) -> Path:
    """A folder with two runs: `base`, and `whole`, which trains an adapter on the model of the first."""

    def make(folder: Path) -> None:
        succeed(run_mmrl("train", write(base_config(folder / "base", family), folder / "base.yaml")))
        # As in released folders of Qwen3.5; transformers has no layer for them.
        file = folder / "base" / "model" / "model.safetensors"
        save_file({**load_file(file), "mtp.fc.weight": torch.ones(2, 2)}, file, metadata={"format": "pt"})
        data = questions(folder / "questions")
        config = adapter_config(folder / "whole", folder / "base" / "model", data)
        done = succeed(run_mmrl("train", write(config, folder / "whole.yaml")))
        assert "1 weights for predicting several tokens" in done.output

    return shared(tmp_path_factory, f"runs-{family}", make)
