"""The packed forward on a CUDA device, by FlexAttention, against the plain one there and the CPU's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmrl.learner.shared_prefix_check import TOLERANCES, ForwardDifference, compare_layouts
from mmrl.policy.batch import collate, group_by_prompt
from mmrl.types import Experience

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")


def layouts(tiny):
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:5]]
    groups = tiny.sampler().generate(prompts, 3, tiny.params, step=0)
    experiences = [Experience(rollout=rollout, advantage=1.0) for group in groups for rollout in group]
    return (
        collate(group_by_prompt(experiences), tiny.processor, pad_id=tiny.eos_id, shared_prefix=shared_prefix)
        for shared_prefix in (True, False)
    )


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
    hidden = replace(
        packed,
        prefix_tree=tuple(
            stem._replace(completion_lengths=(sum(stem.completion_lengths),)) for stem in packed.prefix_tree
        ),
    )
    assert not compare_layouts(tiny.policy, hidden, plain).within(TOLERANCES[dtype])


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_the_cpu(make_tiny, family):
    tiny = make_tiny(family)
    packed, _ = layouts(tiny)
    with torch.no_grad():
        here = tiny.policy.compute_logprobs(packed).logprobs_N
        tiny.policy.model.to("cuda")
        there = tiny.policy.compute_logprobs(packed).logprobs_N.cpu()
    assert (here - there).abs().max() < 1e-4
