"""The pretended device itself: what raises, what waits, and what it says when torch lacks what it needs."""

from functools import partial

import pytest
import torch
from fork_server import run_forked
from torch.torch_version import TorchVersion
from torch.utils import backend_registration
from torch.utils.checkpoint import checkpoint

from mmrl.plan import pretended_device
from mmrl.policy import shared_prefix_attention
from mmrl.policy.batch import PackedGroup
from mmrl.policy.shared_prefix_attention import build_block_mask
from mmrl.types import UserError

ATTENTION = "aten._scaled_dot_product_fused_attention_overrideable"


def test_a_torch_that_cannot_pretend_a_device_says_so_and_skips_the_tests(request, monkeypatch):
    register = pretended_device.register_device.__wrapped__
    monkeypatch.delattr(backend_registration, "_setup_privateuseone_for_python_backend")
    monkeypatch.setattr(pretended_device, "register_device", register)
    message = "cannot pretend a device"
    with pytest.raises(UserError, match=message), pretended_device.pretend_device():
        pass
    with pytest.raises(pytest.skip.Exception, match=message):
        request.getfixturevalue("device")


@pytest.mark.parametrize("version", ["2.9.1", "2.12.0"])
def test_a_torch_that_would_end_the_process_is_refused_before_it_is_tried(monkeypatch, version):
    # A version, because as text "2.9.1" is not below "2.13".
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(backend_registration, "_setup_privateuseone_for_python_backend", pytest.fail)
    with pytest.raises(UserError, match=f"torch {version} cannot pretend a device; torch 2.13 can"):
        pretended_device.register_device.__wrapped__()


@pytest.mark.slow
def test_a_process_that_already_computed_gradients_is_refused():
    code = """
import torch
torch.ones((), requires_grad=True).backward()
from mmrl.plan.pretended_device import pretend_device
with pretend_device():
    pass
"""
    done = run_forked("-c", code)
    assert "UserError: a device cannot be pretended in a process that has computed gradients before" in done.stderr


def test_tensors_of_both_devices_do_not_mix(device):
    with pytest.raises(RuntimeError, match="(?i)device"):
        torch.ones(2, device=device.device) + torch.ones(2)
    # As on CUDA, a number may come from the CPU.
    assert (torch.ones(2, device=device.device) * torch.tensor(2.0)).is_cuda


READS = {
    "item": lambda values: values.sum().item(),
    "tolist": lambda values: values.tolist(),
    "bool": lambda values: bool(values.any()),
    "cpu": lambda values: values.cpu(),
    "copy": lambda values: values.copy_(torch.ones(4)),
    "mask": lambda values: values[values > 0],
    "nonzero": lambda values: values.nonzero(),
    "list as index": lambda values: values[[0, 1]],
}


@pytest.mark.parametrize("name", READS)
def test_a_read_waits_once(device, name):
    values = torch.zeros(4, device=device.device)
    assert not device.synchronisations
    READS[name](values)
    assert device.synchronisations.total() == 1


def test_copies_and_operators_wait_for_nothing(device):
    values = torch.arange(4).pin_memory().to(device.device, non_blocking=True)
    values[torch.tensor([0, 2]).pin_memory().to(device.device, non_blocking=True)] += 1
    torch.where(values > 1, values, 0).sum()
    assert not device.synchronisations


def test_values_from_the_cpu_stay_known(device):
    values = torch.tensor([3, 4], device=device.device) * 2
    assert values.tolist() == [6, 8]
    values.random_(9)
    assert values.tolist() == [1, 1]  # nobody knows them any more


def test_views_and_allocations_are_no_calls(device):
    values = torch.zeros(1024, device=device.device)
    values.view(2, 512)[0].detach()
    torch.empty(4, device=device.device)
    torch.nn.functional.layer_norm(values + 1, (1024,)).add_(1)
    assert device.calls == {
        "aten.zeros.default": 1,
        "aten.add.Tensor": 1,
        "aten.native_layer_norm.default": 1,
        "aten.add_.Tensor": 1,
    }


def test_an_operator_writes_into_a_tensor_that_is_given(device):
    values, out = torch.ones(2, device=device.device), torch.zeros(2, device=device.device)
    device.calls.clear()
    assert torch.add(values, values, out=out) is out
    assert device.calls == {"aten.add.out": 1}
    assert out.tolist() == [2, 2]
    values.random_(9)
    torch.add(values, values, out=out)
    assert out.tolist() == [1, 1]  # nobody knows them any more
    with pytest.raises(RuntimeError, match="(?i)device"):
        torch.add(values, torch.ones(2), out=out)


def attend_by_sdpa(query, key, value):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def attend_by_flex_attention(query, key, value):
    mask = build_block_mask((PackedGroup(4, (2, 2)),), query.device)
    return shared_prefix_attention._compiled_flex_attention()(
        query, key, value, block_mask=mask, scale=0.1, enable_gqa=True
    )


@pytest.mark.parametrize("attend", [attend_by_sdpa, attend_by_flex_attention])
def test_attention_is_one_call_and_copies_no_keys(device, attend):
    query, key, value = (torch.zeros(1, heads, 8, 16, device=device.device, requires_grad=True) for heads in (4, 2, 2))
    attend(query.detach(), key.detach(), value.detach())  # the mask of FlexAttention is made once
    device.calls.clear()
    output = attend(query, key, value)
    assert output.shape == query.shape
    assert device.calls == {f"{ATTENTION}.default": 1}
    output.backward(torch.zeros_like(output))
    assert device.calls[f"{ATTENTION}_backward.default"] == 1
    assert key.grad.shape == key.shape


def test_a_mask_of_flex_attention_on_the_cpu_raises(device):
    query = torch.zeros(1, 2, 8, 16, device=device.device)
    attend = partial(shared_prefix_attention._compiled_flex_attention(), query, query, query, scale=0.1)
    groups = (PackedGroup(4, (2, 2)),)
    mask = build_block_mask(groups, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="reads a tensor of the CPU by indices on the device"):
        attend(block_mask=mask)
    mask.mask_mod = build_block_mask(groups, device.device).mask_mod
    with pytest.raises(RuntimeError, match="the mask of FlexAttention is on cpu"):
        attend(block_mask=mask)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_is_recomputed(device, reentrant):
    block = torch.nn.Linear(4, 4)
    device.place(block)
    inputs = torch.ones(2, 4, device=device.device, requires_grad=True)
    checkpoint(block, inputs, use_reentrant=reentrant).sum().backward()
    assert inputs.grad.is_cuda and block.weight.grad.is_cuda
