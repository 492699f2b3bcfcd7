"""The float32 output layer on a CUDA device: bfloat16 factors, summed in float32, are the product of converted ones."""

import pytest
import torch

from mmrl.policy.logprobs import compute_logits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


def test_a_gpu_sums_bfloat16_products_in_float32():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 256, generator=generator).bfloat16()
    weight = torch.randn(1000, 256, generator=generator).bfloat16()
    expected = hidden.double() @ weight.double().T
    with torch.no_grad():
        found = compute_logits(hidden.cuda(), weight.cuda(), is_float32=True)
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert (found.cpu() - expected).abs().max() < 1e-4  # in bfloat16 up to 0.25: logits reach 70
