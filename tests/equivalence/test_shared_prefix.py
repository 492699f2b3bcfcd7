"""The packed forward against the plain one: every family, every kind of prompt; and that the comparison can fail."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from rounding import GRADIENTS, LOGPROBS

from mmrl.learner.shared_prefix_check import TOLERANCES, ForwardDifference, check_shared_prefix, compare_layouts
from mmrl.policy import gated_delta_net, shared_prefix_attention
from mmrl.policy.batch import PrefixGroup, collate, group_by_prompt
from mmrl.policy.families import FAMILIES
from mmrl.types import Experience, UserError

KINDS = ("image", "two images", "text", "video", "image and video")  # the first samples of a tiny model
EXACT = ForwardDifference(logprobs=LOGPROBS, gradient=GRADIENTS)


def group(tiny, sample, sizes=(6, 1, 4)):
    """Rollouts of one prompt, cut to these lengths."""
    prompt = tiny.processor.build(sample)
    params = replace(tiny.params, temperature=0.7)
    (rollouts,) = tiny.sampler().generate([prompt], len(sizes), params, step=0)
    experiences = []
    for rollout, size in zip(rollouts, sizes, strict=True):
        (segment,) = rollout.segments
        cut = replace(segment, token_ids=segment.token_ids[:size], logprobs=segment.logprobs[:size])
        experiences.append(Experience(rollout=replace(rollout, segments=(cut,)), advantage=1.0))
    return experiences


def layouts(tiny, experiences):
    return (
        collate(group_by_prompt(experiences), tiny.processor, pad_id=tiny.eos_id, shared_prefix=shared_prefix)
        for shared_prefix in (True, False)
    )


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_the_plain_forward(make_tiny, family, kind, recompute):
    tiny = make_tiny(family)
    if recompute:
        tiny.policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = compare_layouts(tiny.policy, *layouts(tiny, group(tiny, tiny.samples[KINDS.index(kind)])))
    assert found.within(EXACT), found
    assert found.logprobs + found.gradient > 0.0  # they are two computations


@pytest.mark.parametrize("family", FAMILIES)
def test_all_kinds_in_one_row_with_groups_of_any_size(make_tiny, family):
    tiny = make_tiny(family)
    sizes = [(6, 5), (3,), (0, 2, 6), (1,), (2, 2, 2, 2)]
    mixed = [e for sample, lengths in zip(tiny.samples, sizes, strict=False) for e in group(tiny, sample, lengths)]
    packed, plain = layouts(tiny, mixed)
    assert len(packed.prefix_tree) == len(sizes)
    found = compare_layouts(tiny.policy, packed, plain)
    assert found.within(EXACT), found


def broken(batch, how):
    positions, (prompt, lengths) = batch.position_ids_3BL, batch.prefix_tree[0]
    match how:
        case "positions do not restart":
            counted = positions[..., :prompt].max() + 1 + torch.arange(sum(lengths))
            return replace(
                batch, position_ids_3BL=torch.cat([positions[..., :prompt], counted.expand(3, 1, -1)], dim=-1)
            )
        case "positions are columns":
            return replace(batch, position_ids_3BL=torch.arange(positions.shape[-1]).expand_as(positions))
        case "siblings see each other":
            return replace(batch, prefix_tree=(PrefixGroup(prompt, (sum(lengths),)),))
        case "the prompt is hidden":
            return replace(
                batch, prefix_tree=(PrefixGroup(prompt, ()), *(PrefixGroup(length, ()) for length in lengths))
            )


BREAKAGES = (
    "positions do not restart",
    "positions are columns",
    "siblings see each other",
    "the prompt is hidden",
)


@pytest.mark.parametrize("how", BREAKAGES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_comparison_can_fail(make_tiny, how, dtype):
    tiny = make_tiny()
    experiences = group(tiny, tiny.samples[1], sizes=(6, 6, 6))
    tiny.policy.model.to(dtype)
    packed, plain = layouts(tiny, experiences)
    assert compare_layouts(tiny.policy, packed, plain).within(TOLERANCES[dtype])
    assert not compare_layouts(tiny.policy, broken(packed, how), plain).within(TOLERANCES[dtype])


def test_the_learner_refuses_an_attention_that_leaks(make_tiny, monkeypatch):
    tiny = make_tiny()
    siblings = group(tiny, tiny.samples[1], sizes=(6, 6))
    check_shared_prefix(tiny.policy, [siblings], tiny.processor, pad_id=tiny.eos_id)
    honest = shared_prefix_attention.attention_blocks
    monkeypatch.setattr(
        shared_prefix_attention,
        "attention_blocks",
        lambda tree: honest(tuple(PrefixGroup(prompt, (sum(own),)) for prompt, own in tree)),
    )
    with pytest.raises(UserError, match=r"sample two-images it differs .* nats .* Set shared_prefix: off"):
        check_shared_prefix(tiny.policy, [siblings], tiny.processor, pad_id=tiny.eos_id)


def test_experts_that_are_close_are_no_error(make_tiny):
    """In bfloat16 the two layouts would send many tokens to different experts."""
    tiny = make_tiny("qwen3_vl_moe")
    siblings = group(tiny, tiny.samples[1], sizes=(6, 6))
    tiny.policy.model.to(torch.bfloat16)
    with torch.no_grad():
        for router in tiny.policy.routers:
            router.weight.copy_(router.weight[:1] + 0.01 * router.weight)
        for name, parameter in tiny.policy.model.named_parameters():
            if name.endswith("experts.down_proj"):
                parameter.mul_(8.0)
    assert not compare_layouts(tiny.policy, *layouts(tiny, siblings)).within(TOLERANCES[torch.bfloat16])
    check_shared_prefix(tiny.policy, [siblings], tiny.processor, pad_id=tiny.eos_id)


def test_recurrent_layers_get_advice_of_their_own(make_tiny, monkeypatch):
    """The planted kernel does not fork the state: completions continue from that of an empty prompt."""
    tiny = make_tiny("qwen3_5")
    siblings = group(tiny, tiny.samples[1], sizes=(6, 6))
    honest = gated_delta_net._apply_rule
    monkeypatch.setattr(gated_delta_net, "_apply_rule", lambda *given: honest(*given[:3], None, *given[4:]))
    with pytest.raises(UserError, match=r"shared_prefix: off, .* not fork the recurrent state; or, .* version"):
        check_shared_prefix(tiny.policy, [siblings], tiny.processor, pad_id=tiny.eos_id)


def test_in_bfloat16_a_wrong_fork_is_found_and_a_right_one_passes(make_tiny, monkeypatch):
    tiny = make_tiny("qwen3_5")
    policy = copy.deepcopy(tiny.policy)
    policy.model.to(torch.bfloat16)
    siblings = group(tiny, tiny.samples[1], sizes=(6, 6))
    check_shared_prefix(policy, [siblings], tiny.processor, pad_id=tiny.eos_id)
    honest = gated_delta_net._apply_rule
    monkeypatch.setattr(gated_delta_net, "_apply_rule", lambda *given: honest(*given[:3], None, *given[4:]))
    with pytest.raises(UserError, match=r"0\.1 and 0\.5 would be rounding"):
        check_shared_prefix(policy, [siblings], tiny.processor, pad_id=tiny.eos_id)


def test_what_is_no_number_is_not_within():
    assert not ForwardDifference(logprobs=float("nan"), gradient=0.0).within(EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_tower_runs_once_for_each_medium(make_tiny, family):
    """In sampling, learning, the reference's passes and later epochs; with the gradients it would have had."""
    tiny = make_tiny(family)
    free, frozen = tiny.policy, type(tiny.policy)(tiny.policy.model, freeze=("vision", "projector"))
    calls = []
    free.model.model.visual.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    batches = [next(layouts(tiny, group(tiny, sample))) for sample in tiny.samples[:5]]
    calls.clear()
    logps = [frozen.compute_logprobs(batch).logprobs_N for batch in batches]
    sum(each.sum() for each in logps).backward()
    gradients = {n: p.grad for n, p in frozen.model.named_parameters() if p.grad is not None}
    assert len(calls) == 6  # one, two, none, a video, a picture and a video
    reference = frozen.frozen_copy()
    again = [policy.compute_logprobs(batch).logprobs_N for policy in (frozen, reference) for batch in batches]
    assert len(calls) == 6
    assert all(torch.equal(a, b) for a, b in zip(again, 2 * logps, strict=True))
    frozen.model.zero_grad()
    uncached = [free.compute_logprobs(batch).logprobs_N for batch in batches]
    sum(each.sum() for each in uncached).backward()
    assert len(calls) > 6
    assert all((a - b).abs().max() < LOGPROBS for a, b in zip(uncached, logps, strict=True))
    for name, parameter in free.model.named_parameters():
        if parameter.grad is not None:
            assert (parameter.grad - gradients[name]).norm() <= GRADIENTS * gradients[name].norm(), name
