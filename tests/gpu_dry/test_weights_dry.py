"""Weights on the pretended device: checkpoints, exports, and how they are packed for an engine and for ZeRO."""

from types import SimpleNamespace

import pytest
import torch

from mmrl.checkpoint.snapshot import CheckpointWeights, Snapshot, copy_to_cpu, load_weights, write_part
from mmrl.config.schema import DeepspeedConfig, LoraConfig, OptimizerConfig
from mmrl.distributed.ranks import SingleProcess
from mmrl.learner.optimizer_torch import TorchOptimizer
from mmrl.policy.lora import create_adapter
from mmrl.policy.model_runner import ModelRunner
from mmrl.rollout.weight_sync import PolicyWeightStream, iter_with_fingerprints
from mmrl.types import TrainingState

RANKS = SingleProcess()


def test_a_checkpoint_is_written_from_the_device_and_loaded_onto_it(make_tiny, device, tmp_path):
    tiny = make_tiny()
    device.place(tiny.policy.model.to(torch.bfloat16))
    optimizer = TorchOptimizer(tiny.policy.trained_by_component, OptimizerConfig(lr=1e-3))
    for parameter in tiny.policy.trainable.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.update(1e-3)
    weights = CheckpointWeights(trainable=tiny.policy.runner.local_shard(tiny.policy.trainable, RANKS))
    snapshot = Snapshot(
        weights=weights, optimizer=optimizer.state(), rng={"cpu": torch.get_rng_state()}, state=TrainingState()
    )
    snapshot = copy_to_cpu(snapshot)
    assert not any(weight.is_cuda for weight in snapshot.weights.trainable.values())
    write_part(tmp_path, snapshot, RANKS)
    load_weights(tmp_path, weights)
    optimizer.load_state(snapshot.optimizer)  # under a pretended device, torch.load returns no numbers
    state = optimizer.state()
    assert all(master.is_cuda for master in state["masters"].values())
    assert all(moments["exp_avg"].is_cuda for moments in state["moments"].values())


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "LoRA"])
def test_weights_are_streamed_to_an_engine_from_the_device(make_tiny, adapter, device):
    tiny = make_tiny("qwen3_5_moe")
    if adapter:
        create_adapter(tiny.policy.model, LoraConfig(rank=2), 0, tiny.policy.family)
    device.place(tiny.policy.model.to(torch.bfloat16))
    fingerprints = {}
    for name, weight in iter_with_fingerprints(PolicyWeightStream(tiny.policy), fingerprints):
        assert weight.is_cuda and weight.dtype == torch.bfloat16, name
    assert fingerprints


@pytest.mark.slow
def test_a_copy_of_weights_for_a_server_that_restarts_returns_to_the_device(make_tiny, device):
    pytest.importorskip("vllm")
    from mmrl.rollout.engines.vllm_server import _HostWeightCopy

    tiny = make_tiny()
    device.place(tiny.policy.model.to(torch.bfloat16))
    stream = PolicyWeightStream(tiny.policy)
    copied = dict(_HostWeightCopy(stream))
    assert copied.keys() == dict(stream).keys()
    assert all(weight.is_cuda for weight in copied.values())


@pytest.mark.slow
def test_weights_are_packed_into_files_for_vllm(make_tiny, device):
    pytest.importorskip("vllm")
    from mmrl.rollout.engines.vllm_weight_transfer import send_files

    tiny = make_tiny()
    device.place(tiny.policy.model.to(torch.bfloat16))
    calls = []
    send_files(PolicyWeightStream(tiny.policy), lambda *call: calls.append(call[0]), file_bytes=2**14)
    assert calls[0] == "begin_load" and calls[-1] == "end_load"
    assert calls.count("load_weights_file") > 1


@pytest.mark.slow
def test_weights_and_moments_are_packed_for_zero(make_tiny, device, waits):
    """DeepSpeed itself is left out: at stage 0 all is whole, as its gathering returns it."""
    pytest.importorskip("deepspeed")
    from mmrl.learner.optimizer_deepspeed import DeepspeedModel, DeepspeedOptimizer

    tiny = make_tiny()
    device.place(tiny.policy.model)
    parameters = list(tiny.policy.trainable.values())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    adamw = torch.optim.AdamW(parameters, fused=True)
    model = object.__new__(DeepspeedModel)
    ModelRunner.__init__(model, tiny.policy.model)
    model.options, model.ranks, model.ordered_parameters = DeepspeedConfig(zero_stage=0), RANKS, parameters
    model.parameters_by_component = tiny.policy.trained_by_component
    model.optimizer = model.local_optimizer = adamw
    model.deepspeed_engine = SimpleNamespace(device=device.device, step=adamw.step)
    model._init_moments()
    optimizer = object.__new__(DeepspeedOptimizer)
    optimizer._model, optimizer._lr_scales = model, [1.0]

    optimizer.update(1e-3)
    assert waits().total() == 1
    shard = model.local_shard(tiny.policy.trainable, RANKS)
    assert not any(weight.is_cuda for weight in shard.values())
    state = optimizer.state()
    assert not any(moments["exp_avg"].is_cuda for moments in state["moments"].values())
    optimizer.load_state(state)
    assert model.full_optimizer_state(parameters[0], "exp_avg").is_cuda
