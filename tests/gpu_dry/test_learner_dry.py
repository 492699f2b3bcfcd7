"""The learner on the pretended device: nothing mixes tensors of both devices, and nothing waits in a micro-batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from learning import make_experiences, make_learner, make_off_policy_experiences
from objectives import LOSSES
from samplers import hf_sampler

from mmrl.config.schema import KlConfig, LoraConfig, LossCoefficientConfig
from mmrl.learner.loss import Objective
from mmrl.learner.tokens import make_token_table
from mmrl.policy.build import enable_gradient_checkpointing
from mmrl.policy.families import FAMILIES
from mmrl.policy.lora import create_adapter
from mmrl.policy.policy import Policy

# Waits of an update, whatever its micro-batches: the metrics together, a norm for each of three components, and the
# norm's way back to the device.
PER_UPDATE = 5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_micro_batch_waits_for_nothing_of_ours(make_tiny, family, device, waits):
    tiny = make_tiny(family)
    batch = tiny.collate(tiny.experiences([tiny.samples[4]], 2))  # an image and a video
    device.place(tiny.policy.model, torch.bfloat16)
    logprobs_N = tiny.policy.compute_logprobs(batch).logprobs_N
    logprobs_N.sum().backward()
    assert logprobs_N.is_cuda
    assert waits() == {}
    assert not any("vision" in place for place in device.synchronisations)
    assert all(parameter.grad is not None for parameter in tiny.policy.trained.values())


def test_each_objective_waits_once_for_all_of_its_metrics(make_tiny, device, waits):
    tiny = make_tiny()
    experiences = make_off_policy_experiences(tiny, group_size=2, demonstrations=True)
    count = sum(len(segment.token_ids) for each in experiences for segment in each.rollout.segments)
    for name, options in LOSSES.items():
        objective = Objective(options, total_steps=4)
        current_N, entropies_N, recomputed_N, reference_N = torch.zeros(4, count, device=device.device)
        table = make_token_table(
            experiences,
            options,
            current_logprobs_N=current_N.requires_grad_(),
            entropies_N=entropies_N.requires_grad_(),
            recomputed_logprobs_N=recomputed_N,
            reference_logprobs_N=reference_N,
        )
        loss, metrics, _ = objective(table, objective.count_denominators(experiences), step=0)
        loss.backward()
        assert waits() == {}, name
        assert metrics.values()
        assert sum(waits().values()) == 1, name


VARIANTS = ["KL and entropy", "LoRA", "recomputed", "float32 output", "frozen tower", "own rows"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_of_the_learner_wait_a_few_times_an_update(make_tiny, variant, device, waits):
    tiny = make_tiny()
    experiences = make_off_policy_experiences(tiny, group_size=2)
    model, reference, options = tiny.policy.model, None, {}
    match variant:
        case "LoRA":
            create_adapter(model, LoraConfig(rank=2), seed=0)
        case "recomputed":
            enable_gradient_checkpointing(model, ("vision", "language"))
        case "own rows":
            options["shared_prefix"] = False
    device.place(model, torch.bfloat16)
    freeze = ("vision", "projector") if variant == "frozen tower" else ()
    tiny = replace(
        tiny, policy=Policy(model, freeze=freeze, float32_output_layer=variant == "float32 output", logits_chunk=8)
    )
    if variant == "KL and entropy":
        reference = tiny.policy.frozen_copy()
        options |= {"kl": KlConfig(coef=0.1), "entropy": LossCoefficientConfig(coef=0.1)}
    learner = make_learner(tiny, reference=reference, micro_batch_groups=1, **options)
    learner.step(experiences, step=0)  # with the check of the shared prefix
    waits()
    learner.step(experiences, step=1)
    assert sum(waits().values()) <= PER_UPDATE
    assert learner.token_values([0])[0].logprobs


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["learner", "engine"])
def test_routes_are_replayed(make_tiny, replay, device, waits):
    tiny = make_tiny("qwen3_5_moe")
    sampler = hf_sampler(tiny.policy, tiny.processor, record_routes=True)
    experiences = make_off_policy_experiences(tiny, group_size=2, sampler=sampler)[:4]
    device.place(tiny.policy.model, torch.bfloat16)
    learner = make_learner(tiny, routing_replay=replay, epochs=2)
    learner.step(experiences, step=0)
    waits()
    learner.step(experiences, step=1)
    # Two updates, each with a read of the routers' sums; the first also compares routes.
    assert sum(waits().values()) <= 2 * (PER_UPDATE + 1) + 1


# Modules that send tensors to the device, and a family that needs it.
SENDERS = {
    "mmrl.policy.batch": "qwen2_5_vl",
    "mmrl.policy.shared_prefix_attention": "qwen2_5_vl",
    "mmrl.policy.vision_attention": "qwen2_5_vl",
    "mmrl.policy.policy": "qwen2_5_vl",
    "mmrl.policy.gated_delta_net": "qwen3_5",
}


@pytest.mark.slow
@pytest.mark.parametrize("module", SENDERS)
def test_a_tensor_that_is_not_sent_is_found(make_tiny, module, device, monkeypatch):
    tiny = make_tiny(SENDERS[module])
    experiences = [replace(each, advantage=1.0) for each in make_experiences(tiny, (1.0, -1.0), num_prompts=1)]
    batch = tiny.collate(experiences)
    device.place(tiny.policy.model, torch.bfloat16)
    monkeypatch.setattr(f"{module}.send", lambda tensor, device, dtype=None: tensor)
    with pytest.raises(RuntimeError, match="(?i)device"):
        tiny.policy.compute_logprobs(batch).logprobs_N.sum().backward()


def test_tokens_that_are_not_sent_are_found(make_tiny, device, monkeypatch):
    tiny = make_tiny()
    experiences, options = make_experiences(tiny, num_prompts=1), LOSSES["algorithm grpo"]
    objective = Objective(options, total_steps=4)
    monkeypatch.setattr("mmrl.learner.tokens.send", lambda tensor, device: tensor)
    scores_N = torch.zeros(sum(each.rollout.num_tokens for each in experiences), device=device.device)
    table = make_token_table(
        experiences,
        options,
        current_logprobs_N=scores_N.requires_grad_(),
        entropies_N=scores_N,
        recomputed_logprobs_N=scores_N,
        reference_logprobs_N=None,
    )
    with pytest.raises(RuntimeError, match="(?i)device"):
        objective(table, objective.count_denominators(experiences), step=0)
