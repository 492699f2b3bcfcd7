"""Recurrent layers: the choice between kernels and torch code, and the indices that docstrings of them show."""

import re
import sys
from functools import wraps
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as modeling_qwen3_5

from mmrl.policy import gated_delta_kernels
from mmrl.policy.batch import PackedGroup
from mmrl.policy.gated_delta_kernels import describe_slow_path, install_kernel_choice
from mmrl.policy.gated_delta_net import plan_append, plan_fork

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


def test_new_tokens_of_three_rows_move_as_in_the_docstring():
    plan = plan_append(torch.tensor([[0, 0, 1], [0, 1, 1], [1, 1, 1]]), window_length=2)
    assert plan.leftward_RS.tolist() == [[2, 2, 2], [1, 2, 2], [0, 1, 2]]
    assert plan.tokens_RS.tolist() == [[0, 9, 9], [3, 4, 9], [6, 7, 8]]
    assert plan.window_RS.tolist() == [[1, 2], [2, 3], [3, 4]]
    assert plan.rightward_RS.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 2]]


def test_two_prompts_are_forked_as_in_the_docstring():
    plan = plan_fork((PackedGroup(2, (1, 2)), PackedGroup(1, (1,))), 3, torch.device("cpu"))
    assert plan.conv_tokens.tolist() == [*(7, 7, 0, 1), *(0, 1, 2), *(0, 1, 3, 4), *(7, 7, 5), *(7, 5, 6)]
    assert plan.conv_kept_T.tolist() == [2, 3, 6, 9, 10, 13, 16]
    assert [batch.tokens_NS.tolist() for batch in plan.prompts] == [[[0, 1], [5, 7]]]
    assert [batch.tokens_NS.tolist() for batch in plan.responses] == [[[2, 7], [3, 4], [6, 7]]]
    assert plan.prompt_of_response.tolist() == [0, 0, 1]
    assert plan.output_places_T.tolist() == [0, 1, 4, 6, 7, 2, 8]
