"""The choice between kernels and torch code for recurrent layers, and the notice where kernels are missing."""

import re
import sys
from functools import wraps
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as modeling_qwen3_5

from mmrl.policy import gated_delta_kernels
from mmrl.policy.gated_delta_kernels import describe_slow_path, install_kernel_choice

MODULES = ("fla", "fla.ops", "fla.ops.gated_delta_rule", "causal_conv1d")


@pytest.mark.parametrize(
    ("device", "dtype", "missing", "words"),
    [
        ("cuda", torch.bfloat16, MODULES[:3], "flash-linear-attention: .*pip install --no-build-isolation 'mmrl"),
        ("cuda", torch.bfloat16, MODULES[3:], "causal-conv1d: .*pip install --no-build-isolation 'mmrl"),
        ("cuda", torch.float32, (), "model.dtype is float32"),
        ("cuda", torch.bfloat16, (), None),
        ("cpu", torch.bfloat16, MODULES, None),
    ],
)
def test_missing_kernels_are_reported_on_a_gpu(monkeypatch, device, dtype, missing, words):
    gated_delta_kernels.import_kernels.cache_clear()
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None if name in missing else ModuleType(name))
    notice = describe_slow_path(device, dtype)
    monkeypatch.setattr(gated_delta_kernels, "suits_kernel", lambda tensor: True)
    assert gated_delta_kernels.has_rule_kernel(torch.zeros(1)) == ("fla" not in missing)
    gated_delta_kernels.import_kernels.cache_clear()
    assert (notice is None) == (words is None)
    assert words is None or re.search(words, notice)


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "expected"),
    [(True, torch.bfloat16, "kernel"), (True, torch.float32, "torch"), (False, torch.bfloat16, "torch")],
)
def test_a_tensor_goes_to_a_kernel_on_a_gpu_in_16_bits(is_cuda, dtype, expected):
    calls = []

    def torch_code(tensor, **_):
        calls.append("torch")

    # Where kernels are installed, transformers' functions run them for any tensor.
    @wraps(torch_code)
    def wrapped(tensor, **_):
        calls.append("kernel")

    modeling = SimpleNamespace(**dict.fromkeys(gated_delta_kernels._FUNCTIONS, wrapped))
    install_kernel_choice(modeling)
    chosen = modeling.causal_conv1d_fn
    install_kernel_choice(modeling)  # once more, for another model
    assert modeling.causal_conv1d_fn is chosen
    for name in gated_delta_kernels._FUNCTIONS:
        getattr(modeling, name)(SimpleNamespace(is_cuda=is_cuda, dtype=dtype), activation="silu")
    assert calls == [expected] * 4


def test_the_installed_transformers_has_the_functions_to_choose_for():
    install_kernel_choice(modeling_qwen3_5)
    for name in gated_delta_kernels._FUNCTIONS:
        assert getattr(modeling_qwen3_5, name) in gated_delta_kernels._CHOICES
