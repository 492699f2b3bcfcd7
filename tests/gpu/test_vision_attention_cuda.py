"""Vision towers on a CUDA device: one variable-length call a block, and nothing that waits for the device."""

import copy

import pytest
import torch

from mmrl.config.schema import FromScratchConfig, VisionFromScratchConfig
from mmrl.policy.families import FAMILIES
from mmrl.policy.policy import PolicyModel
from mmrl.policy.tiny_models import make_model, train_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
GRIDS = torch.tensor([[1, 16, 16], [1, 12, 20], [3, 8, 12], [1, 4, 4]])


@pytest.fixture(params=FAMILIES)
def towers(request, monkeypatch):
    """The tower as transformers runs it and as a policy does, in float32 on the CPU."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    vision = VisionFromScratchConfig(hidden_size=160, num_heads=2, intermediate_size=160, num_layers=2)
    spec = FromScratchConfig(family=request.param, vision=vision)
    model = make_model(spec, train_tokenizer(["How many red circles?"] * 3, 330), seed=1)
    tower = model.model.visual
    if request.param == "qwen2_5_vl":
        tower.fullatt_block_indexes, tower.window_size = [1], 8 * tower.patch_size
    return copy.deepcopy(tower), PolicyModel(model).model.model.visual


def run(tower, dtype, grids):
    """Output, and all gradients in one tensor, in float32 on the CPU, of noise on the device."""
    tower = copy.deepcopy(tower).to("cuda", dtype)
    generator = torch.Generator().manual_seed(0)
    width = 3 * tower.config.temporal_patch_size * tower.config.patch_size**2
    patches = torch.randn(int(GRIDS.prod(dim=1).sum()), width, generator=generator).to("cuda", dtype)
    output = tower(patches, grid_thw=grids).pooler_output
    upstream = torch.randn(output.shape, generator=generator).to(output)
    output.backward(upstream)
    gradients = [weight.grad.flatten() for weight in tower.parameters() if weight.grad is not None]
    return output.detach().float().cpu(), torch.cat(gradients).float().cpu()


def differences(found, expected):
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


def test_float32_is_that_of_transformers(towers):
    by_transformers, ours = towers
    expected = run(by_transformers, torch.float32, GRIDS.cuda())
    assert max(differences(run(ours, torch.float32, GRIDS), expected)) < 1e-5


def test_bfloat16_is_as_exact_as_transformers(towers, monkeypatch):
    by_transformers, ours = towers
    calls = []
    varlen = pytest.importorskip("torch.nn.attention.varlen")  # came with torch 2.10
    attend = varlen.varlen_attn
    monkeypatch.setattr(varlen, "varlen_attn", lambda *inputs: calls.append(inputs) or attend(*inputs))
    exact = run(by_transformers, torch.float32, GRIDS.cuda())
    rounded = differences(run(by_transformers, torch.bfloat16, GRIDS.cuda()), exact)
    found = differences(run(ours, torch.bfloat16, GRIDS), exact)
    assert len(calls) == len(ours.blocks)
    # Windows that see each other change more than half of the output.
    assert all(ours_differs < 2 * theirs < 0.2 for ours_differs, theirs in zip(found, rounded, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_tower_never_waits_for_the_device(towers, dtype):
    tower = copy.deepcopy(towers[1]).to("cuda", dtype)
    width = 3 * tower.config.temporal_patch_size * tower.config.patch_size**2
    patches = torch.randn(int(GRIDS.prod(dim=1).sum()), width, device="cuda", dtype=dtype)
    tower(patches, grid_thw=GRIDS).pooler_output.sum().backward()  # libraries may wait at their first call
    torch.cuda.set_sync_debug_mode("error")
    try:
        tower(patches, grid_thw=GRIDS).pooler_output.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
