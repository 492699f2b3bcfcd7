"""Which tensors of a recurrent layer go to a kernel, and what is said where there is none."""

from __future__ import annotations

import sys
from functools import wraps
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mmrl.policy import gated_delta_kernels
from mmrl.policy.gated_delta_kernels import describe_slow_path, install_kernel_choice

NO_FLA = ("flash-linear-attention", ModuleNotFoundError("No module named 'fla'"))


def test_a_gpu_without_kernels_is_told_of_and_what_to_do():
    said = describe_slow_path("cuda", torch.bfloat16, [NO_FLA])
    assert "flash-linear-attention: No module named 'fla'" in said
    assert "pip install --no-build-isolation 'mmrl[hybrid]'" in said
    assert describe_slow_path("cuda", torch.bfloat16, []) is None
    assert describe_slow_path("cpu", torch.bfloat16, [NO_FLA]) is None
    assert "model.dtype is float32" in describe_slow_path("cuda", torch.float32, [])


def test_packages_are_tried_by_import(monkeypatch):
    gated_delta_kernels.import_kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "causal_conv1d", ModuleType("causal_conv1d"))
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it was not installed
    said = describe_slow_path("cuda", torch.bfloat16)
    assert "flash-linear-attention: " in said and "causal-conv1d" not in said
    monkeypatch.setattr(gated_delta_kernels, "suits_kernel", lambda tensor: True)
    assert not gated_delta_kernels.has_rule_kernel(torch.zeros(1))
    gated_delta_kernels.import_kernels.cache_clear()


def modeling_file(calls):
    """A modeling file of transformers where kernels are installed: its functions would run them for any tensor."""

    def torch_code(tensor, **_):
        calls.append("torch")

    @wraps(torch_code)
    def wrapped(tensor, **_):
        calls.append("kernel")

    return SimpleNamespace(**dict.fromkeys(gated_delta_kernels._FUNCTIONS, wrapped))


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "expected"),
    [
        (True, torch.bfloat16, "kernel"),
        (True, torch.float32, "torch"),
        (False, torch.bfloat16, "torch"),
    ],
)
def test_a_tensor_goes_to_a_kernel_on_a_gpu_in_16_bits(is_cuda, dtype, expected):
    calls = []
    modeling = modeling_file(calls)
    install_kernel_choice(modeling)
    chosen = modeling.causal_conv1d_fn
    install_kernel_choice(modeling)  # once more, for another model
    assert modeling.causal_conv1d_fn is chosen
    for name in gated_delta_kernels._FUNCTIONS:
        getattr(modeling, name)(SimpleNamespace(is_cuda=is_cuda, dtype=dtype), activation="silu")
    assert calls == [expected] * 4


def test_the_installed_transformers_has_these_functions():
    import transformers.models.qwen3_5.modeling_qwen3_5 as modeling

    install_kernel_choice(modeling)
    for name in gated_delta_kernels._FUNCTIONS:
        assert getattr(modeling, name) in gated_delta_kernels._CHOICES
