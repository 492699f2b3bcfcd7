"""The packed forward on a CUDA device, by FlexAttention, against the plain one there and the CPU's."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mmrl
from mmrl.learner.shared_prefix_check import TOLERANCES, ForwardDifference, compare_layouts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
PACKAGE = Path(mmrl.__file__).parent
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")


def layouts(tiny):
    experiences = tiny.experiences(tiny.samples[:5], 3)
    return tiny.collate(experiences), tiny.collate(experiences, shared_prefix=False)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_the_plain_forward(make_tiny, family, dtype, recompute, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    tiny = make_tiny(family)
    packed, plain = layouts(tiny)
    tiny.policy.model.to("cuda", dtype)
    if recompute:
        tiny.policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = compare_layouts(tiny.policy, packed, plain)
    bound = ForwardDifference(logprobs=1e-5, gradient=1e-4) if dtype == torch.float32 else TOLERANCES[dtype]
    assert found.within(bound), found
    joined = tuple(group._replace(response_lengths=(sum(group.response_lengths),)) for group in packed.packed_groups)
    assert not compare_layouts(tiny.policy, replace(packed, packed_groups=joined), plain).within(TOLERANCES[dtype])


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_the_cpu(make_tiny, family):
    tiny = make_tiny(family)
    packed, _ = layouts(tiny)
    with torch.no_grad():
        on_cpu = tiny.policy.compute_logprobs(packed).logprobs_N
        tiny.policy.model.to("cuda")
        on_gpu = tiny.policy.compute_logprobs(packed).logprobs_N.cpu()
    assert (on_cpu - on_gpu).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_micro_batch_waits_for_nothing_of_ours(make_tiny, family):
    tiny = make_tiny(family)
    packed, _ = layouts(tiny)
    tiny.policy.model.to("cuda", torch.bfloat16)

    def learn():
        tiny.policy.compute_logprobs(packed).logprobs_N.sum().backward()

    learn()  # compiles kernels
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            learn()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchronizing" in str(warning.message)]
    ours = [f"{wait.filename}:{wait.lineno}" for wait in waits if Path(wait.filename).is_relative_to(PACKAGE)]
    assert not ours
