"""Weights on the pretended device: checkpoints, exports, and what an engine is sent."""

from __future__ import annotations

import pytest
import torch
from learning import make_experiences, make_learner

from mmrl.checkpoint.snapshot import CheckpointWeights, Snapshot, copy_to_cpu, load_weights, write_part
from mmrl.config.schema import LoraConfig, OptimizerConfig
from mmrl.distributed.ranks import SingleProcess
from mmrl.learner.optimizer_torch import TorchOptimizer
from mmrl.policy.lora import create_adapter
from mmrl.rollout.weight_sync import PolicyWeightStream, iter_with_fingerprints
from mmrl.types import TrainingState


def test_a_checkpoint_is_written_from_the_device_and_loaded_onto_it(make_tiny, device, tmp_path):
    tiny = make_tiny()
    experiences = make_experiences(tiny, (1.0, -1.0), num_prompts=1)
    device.place(tiny.policy.model, torch.bfloat16)
    optimizer = TorchOptimizer(tiny.policy.trained_by_component, OptimizerConfig(lr=1e-3))
    make_learner(tiny, optimizer=optimizer).step(experiences, step=0)
    weights = CheckpointWeights(trained=tiny.policy.trained)
    snapshot = Snapshot(
        weights=weights, optimizer=optimizer.state(), rng={"cpu": torch.get_rng_state()}, state=TrainingState()
    )
    snapshot = copy_to_cpu(snapshot)
    write_part(tmp_path, snapshot, SingleProcess())
    load_weights(tmp_path, weights)
    optimizer.load_state(snapshot.optimizer)  # under a pretended device, torch.load returns no numbers
    assert all(master.is_cuda for master in optimizer.state()["masters"].values())


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "LoRA"])
def test_weights_are_streamed_to_an_engine_from_the_device(make_tiny, adapter, device):
    tiny = make_tiny("qwen3_5_moe")
    if adapter:
        create_adapter(tiny.policy.model, LoraConfig(rank=2), seed=0)
    device.place(tiny.policy.model, torch.bfloat16)
    fingerprints = {}
    for name, weight in iter_with_fingerprints(PolicyWeightStream(tiny.policy), fingerprints):
        assert weight.is_cuda and weight.dtype == torch.bfloat16, name
    assert fingerprints
