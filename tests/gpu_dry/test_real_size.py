"""A group of Qwen2.5-VL-3B's size on the pretended device, as `tools/bench/launches.py` makes it."""

from pathlib import Path

import pytest

from mmrl.config.schema import ModelConfig, OptimizerConfig
from mmrl.learner.optimizer_torch import TorchOptimizer
from mmrl.plan.measure import make_policy

BENCH = Path(__file__).parents[2] / "tools" / "bench"


@pytest.mark.slow
def test_an_update_of_3b_waits_once(device, waits, monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    from launches import make_group, read_model

    model = read_model("3B")
    policy = make_policy(model, ModelConfig(path="", dtype="bfloat16"))
    device.place(policy.model)
    assert sum(weight.numel() for weight in policy.trainable.values()) == 3_754_622_976
    optimizer = TorchOptimizer(policy.trained_by_component, OptimizerConfig(lr=1e-6))
    optimizer.backward(policy.compute_logprobs(make_group(model, 64, 1)).logprobs_N.sum())
    assert not waits()
    optimizer.update(1e-6)
    assert waits().total() == 1
