"""The learner on the pretended device: nothing mixes tensors of both devices, and nothing waits in a micro-batch."""

from dataclasses import replace

import pytest
import torch
from learning import KeepGradients, make_learner, make_off_policy_experiences
from objectives import LOSSES
from samplers import hf_sampler
from tool_calls import zoom_response

from mmrl.config.schema import KlConfig, LoraConfig, LossCoefficientConfig
from mmrl.policy.build import enable_gradient_checkpointing
from mmrl.policy.families import FAMILIES
from mmrl.policy.lora import create_adapter
from mmrl.policy.policy import PolicyModel
from mmrl.types import Experience, UserError

# The waits of an update, whatever its micro-batches: the norms of all components together, and all metrics together.
PER_UPDATE = 2
IMAGE_AND_VIDEO = 4  # number of such a sample


@pytest.mark.parametrize("family", FAMILIES)
def test_a_micro_batch_waits_for_nothing_of_ours(make_tiny, family, device, waits):
    tiny = make_tiny(family)
    batch = tiny.collate(tiny.experiences([tiny.samples[IMAGE_AND_VIDEO]], 2))
    device.place(tiny.policy.model.to(torch.bfloat16))
    logprobs_N = tiny.policy.compute_logprobs(batch).logprobs_N
    logprobs_N.sum().backward()
    assert logprobs_N.is_cuda
    assert not waits()
    assert all(parameter.grad is not None for parameter in tiny.policy.trainable.values())


def test_heads_too_narrow_for_flex_attention_are_said(make_tiny, device):
    tiny = make_tiny(hidden_size=48)
    batch = tiny.collate(tiny.experiences(tiny.samples[:1], 2))
    device.place(tiny.policy.model.to(torch.bfloat16))
    with pytest.raises(UserError, match="heads of 12 channels are too narrow"):
        tiny.policy.compute_logprobs(batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_vision_tower_waits_for_nothing_and_has_as_many_calls_for_any_media(make_tiny, family, device):
    tiny = make_tiny(family)
    device.place(tiny.policy.model.to(torch.bfloat16))
    tower = tiny.policy.model.get_submodule(tiny.policy.family.vision_module)
    calls = []
    # One square window; windows of several sizes; two pictures and a video of two frames.
    for grids in ([[1, 8, 8]], [[1, 12, 20]], [[1, 12, 20], [2, 8, 4], [1, 4, 4]]):
        grids_I3 = torch.tensor(grids)
        num_patches = int(grids_I3.prod(dim=-1).sum())
        patches_MD = torch.zeros(num_patches, tiny.policy.patch_dim, device=device.device, dtype=torch.bfloat16)
        tower.zero_grad()
        device.calls.clear()
        device.synchronisations.clear()
        tower(patches_MD, grid_thw=grids_I3).pooler_output.sum().backward()
        calls.append(device.calls.total())
        assert not device.synchronisations
    assert calls == calls[:1] * 3


def test_no_policy_loss_waits_for_more_than_its_metrics(make_tiny, device, waits, unscored):
    tiny = make_tiny()
    experiences = make_off_policy_experiences(tiny, group_size=2, demonstrations=True)
    experiences = [*experiences[:2], experiences[10]]  # a group, and a demonstration of its prompt
    device.place(tiny.policy.model.to(torch.bfloat16))
    reference = tiny.policy.frozen_copy()
    for name, loss in LOSSES.items():
        waits()
        learner = make_learner(tiny, loss=loss, reference=reference, optimizer=KeepGradients(), shared_prefix=False)
        assert "learner/loss" in learner.step(experiences, step=0)
        assert waits().total() == 1, name  # for the metrics; such an optimizer reads no norms


VARIANTS = ["KL and entropy", "LoRA", "recomputed", "float32 output", "frozen", "own rows", "tool media", "start check"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_waits_twice(make_tiny, variant, device, waits):
    tiny = make_tiny()
    experiences = tiny.experiences([tiny.samples[IMAGE_AND_VIDEO]], 2)
    model, reference, options = tiny.policy.model, None, {}
    match variant:
        case "LoRA":
            create_adapter(model, LoraConfig(rank=2), 0, tiny.policy.family)
        case "recomputed":
            enable_gradient_checkpointing(model, ("vision", "language"), tiny.policy.family)
        case "own rows":
            options["shared_prefix"] = False
        case "tool media":
            experiences = [Experience(rollout=zoom_response(tiny), advantage=1.0)] * 2
    device.place(model.to(torch.bfloat16))
    freeze = ("vision", "projector") if variant == "frozen" else ()
    tiny = replace(
        tiny, policy=PolicyModel(model, freeze=freeze, float32_output_layer=variant == "float32 output", logits_chunk=8)
    )
    if variant == "KL and entropy":
        reference = tiny.policy.frozen_copy()
        options |= {"kl": KlConfig(coef=0.1), "entropy": LossCoefficientConfig(coef=0.1)}
    learner = make_learner(tiny, reference=reference, **options)
    learner._shared_prefix_checked = variant != "start check"
    learner.step(experiences, step=0)
    if variant == "start check":
        assert any(place.startswith("mmrl/learner/shared_prefix_check.py") for place in waits())
        return
    assert waits().total() == PER_UPDATE
    assert learner.token_values([0])[0].logprobs


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["learner", "engine"])
def test_routes_are_replayed(make_tiny, replay, device, waits):
    tiny = make_tiny("qwen3_5_moe")
    sampler = hf_sampler(tiny.policy, tiny.processor, record_routes=True)
    experiences = make_off_policy_experiences(tiny, group_size=1, sampler=sampler)[:2]
    device.place(tiny.policy.model.to(torch.bfloat16))
    learner = make_learner(tiny, routing_replay=replay, ppo_epochs=2)
    learner._shared_prefix_checked = True
    learner.step(experiences, step=0)
    # Two updates, each with a read of the routers' sums; the first also compares the engine's routes.
    assert waits().total() == 2 * (PER_UPDATE + 1) + (replay == "engine")
