"""The gradient of a step does not depend on how it is cut into batches, and it is the right one."""

from dataclasses import replace

import learning
import pytest
import torch
from rounding import GRADIENTS

from mmrl.policy.families import FAMILIES
from mmrl.types import Author, Experience, ImageRef, Segment, VideoRef


def check_cuts(tiny, experiences, cuts, **options):
    """Compare the gradient and the metrics of a step with those of the same step cut otherwise; return the metrics."""
    metrics, whole = learning.step_gradient(tiny, experiences, **options)
    for cut in cuts:
        cut_metrics, parts = learning.step_gradient(tiny, experiences, **options, **cut)
        assert learning.relative_difference(parts, whole) < GRADIENTS, cut
        assert cut_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6), cut
    assert any("visual" in name for name in whole)
    return metrics


def test_small_groups_and_short_responses_have_the_same_gradient_in_every_cut(make_tiny):
    """A group of one, one of two, responses of one token and of none, a prompt without an image among others."""
    tiny = make_tiny()
    one, _, _, _, two, other, _, _, *rest = learning.make_off_policy_experiences(tiny)
    shortened = [
        learning.cut_response(experience, length) for experience, length in zip(rest, (1, 1, 0, 2), strict=False)
    ]
    experiences = [one, two, other, *shortened, *rest[4:]]
    check_cuts(tiny, experiences, ({"micro_batch_groups": 1}, {"shared_prefix": False}, {"micro_batch_tokens": 1}))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_does_not_depend_on_batching(make_tiny, family):
    tiny = make_tiny(family)
    experiences = learning.make_off_policy_experiences(tiny, demonstrations=True)
    cuts = [{"micro_batch_groups": groups} for groups in (1, 4)]
    cuts += [{"micro_batch_tokens": tokens} for tokens in (1, 150)]  # the second splits some groups
    cuts += [{"micro_batch_groups": 2, "shared_prefix": False}]
    metrics = check_cuts(tiny, experiences, cuts, reference=learning.perturbed_copy(tiny.policy), kl={"coef": 0.1})
    assert metrics["policy/clip_frac"] > 0


def test_copies_of_a_sample_have_the_gradient_of_one_large_group(make_tiny):
    tiny = make_tiny()
    group = learning.make_off_policy_experiences(tiny, group_size=6)[:6]
    copies = [
        copy for number in range(3) for copy in learning.copy_of_sample(group[2 * number : 2 * number + 2], number)
    ]
    metrics, whole = learning.step_gradient(tiny, group)
    cuts = ({}, {"micro_batch_groups": 2}, {"shared_prefix": False})
    for cut in cuts:
        copy_metrics, parts = learning.step_gradient(tiny, copies, **cut)
        assert learning.relative_difference(parts, whole) < GRADIENTS, cut
        assert copy_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6), cut


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradient_equal_a_slow_independent_version(make_tiny, family):
    """One sequence and one token at a time, with position ids counted out, without code of the learner."""
    tiny = make_tiny(family)
    experiences = list(map(add_continuation, learning.make_off_policy_experiences(tiny)))
    metrics, ours = learning.step_gradient(tiny, experiences)
    tiny.policy.model.zero_grad()
    total = sum(len(s.token_ids) for e in experiences for s in e.rollout.segments if s.author is Author.POLICY)
    loss = sum(slow_surrogate(tiny, experience) for experience in experiences) / total
    loss.backward()
    assert metrics["learner/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert learning.relative_difference(ours, learning.gradients_of(tiny.policy)) < GRADIENTS


def add_continuation(experience):
    """Return the response cut in two with a trigger between, the second part sampled at another temperature."""
    (whole,) = experience.rollout.segments
    first = replace(whole, token_ids=whole.token_ids[:2], logprobs=whole.logprobs[:2])
    cooler = replace(experience.rollout.sampling_params, temperature=0.6)
    second = replace(whole, token_ids=whole.token_ids[2:], logprobs=whole.logprobs[2:], sampling_params=cooler)
    trigger_ids = (*first.token_ids, *first.token_ids[:1])
    trigger = Segment(token_ids=trigger_ids, logprobs=(0.0,) * len(trigger_ids), author=Author.FORCED)
    return learning.replace_segments(experience, first, trigger, second)


def slow_surrogate(tiny, experience):
    rollout, prompt = experience.rollout, experience.rollout.prompt
    tokens = [
        (token, logp, (segment.sampling_params or rollout.sampling_params).temperature, segment.author is Author.POLICY)
        for segment in rollout.segments
        for token, logp in zip(segment.token_ids, segment.logprobs, strict=True)
    ]
    completion = [token for token, *_ in tokens]
    ids = torch.tensor([[*prompt.token_ids, *completion]])
    tensors = tiny.processor.prompt_tensors(prompt)
    kinds = {
        ImageRef: ("pixel_values", tensors.image_patches_MD, "image"),
        VideoRef: ("pixel_values_videos", tensors.video_patches_MD, "video"),
    }
    media = {}
    for kind, (name, patches, modality) in kinds.items():
        if grids := [one for ref, one in zip(prompt.sample.media, prompt.grids, strict=True) if isinstance(ref, kind)]:
            media |= {name: patches, f"{modality}_grid_thw": torch.tensor(grids)}
    positions, types = slow_positions(tiny, ids[0].tolist(), prompt), tiny.processor.placeholders.token_types(ids)
    options = {"attention_mask": torch.ones_like(ids), "position_ids": positions, "mm_token_type_ids": types}
    logits = tiny.policy.model(input_ids=ids, **options, **media).logits[0]
    allowed = [i for i in range(logits.shape[-1]) if i not in rollout.sampling_params.banned_token_ids]
    loss = 0.0
    for t, (token, old, temperature, sampled) in enumerate(tokens):
        if not sampled:
            continue
        row = logits[len(prompt.token_ids) + t - 1] / temperature
        logp = row[token] - torch.logsumexp(row[allowed], 0)
        ratio = torch.exp(logp - old)
        bounded = min(max(ratio, torch.tensor(0.8)), torch.tensor(1.2))
        loss = loss - min(ratio * experience.advantage, bounded * experience.advantage)
    return loss


def slow_positions(tiny, ids, prompt):
    """Token by token: text stands one after the largest position so far, a patch where its time, row and column say.

    The clip has 4 frames in 2 seconds, so its pairs of frames are 1 second apart: 2 positions in Qwen2.5-VL.
    """
    family, marks = tiny.policy.model.config.model_type, tiny.processor.placeholders
    blocks = []
    for ref, (time, height, width) in zip(prompt.sample.media, prompt.grids, strict=True):
        step = 2 if isinstance(ref, VideoRef) and family == "qwen2_5_vl" else 1
        shape = [(t * step, h, w) for t in range(time) for h in range(height // 2) for w in range(width // 2)]
        per_frame = len(shape) // time
        apart = isinstance(ref, VideoRef) and family.startswith("qwen3")
        blocks += [[(0, h, w) for _, h, w in shape[:per_frame]]] * time if apart else [shape]
    positions, largest = [], -1
    while len(positions) < len(ids):
        if ids[len(positions)] in (marks.image_id, marks.video_id):
            block = [[largest + 1 + axis for axis in place] for place in blocks.pop(0)]
        else:
            block = [[largest + 1] * 3]
        positions += block
        largest = max(max(place) for place in positions)
    return torch.tensor(positions).T[:, None]


def test_likelihood_of_a_demonstration_equals_the_loss_of_transformers(make_tiny):
    tiny = make_tiny()
    prompt = tiny.processor.build(tiny.samples[0])
    demonstration = tiny.processor.build_demonstration(prompt, prompt.sample.target)
    metrics, _ = learning.step_gradient(tiny, [Experience(rollout=demonstration, advantage=0.0)])
    ids = torch.tensor([[*prompt.token_ids, *demonstration.segments[0].token_ids]])
    labels = ids.clone()
    labels[:, : len(prompt.token_ids)] = -100
    loss = tiny.policy.model(
        input_ids=ids,
        labels=labels,
        mm_token_type_ids=(ids == tiny.processor.placeholders.image_id).int(),
        pixel_values=tiny.processor.prompt_tensors(prompt).image_patches_MD,
        image_grid_thw=torch.tensor(prompt.grids),
    ).loss
    assert metrics["learner/loss"] == pytest.approx(loss.item(), rel=1e-4)


def test_rollouts_without_advantage_have_no_gradient_but_count_in_the_denominator(make_tiny):
    tiny = make_tiny()
    experiences = learning.make_off_policy_experiences(tiny)
    experiences = [replace(e, advantage=0.0) if i % 4 == 1 else e for i, e in enumerate(experiences)]
    active = [experience for experience in experiences if experience.advantage]
    metrics, skipping = learning.step_gradient(tiny, experiences)
    active_metrics, alone = learning.step_gradient(tiny, active)
    num_tokens, num_active = (sum(e.rollout.num_tokens for e in own) for own in (experiences, active))
    assert metrics["learner/no_gradient_frac"] == 0.25
    scaled = {name: gradient * num_active / num_tokens for name, gradient in alone.items()}
    assert learning.relative_difference(skipping, scaled) < GRADIENTS
    # Metrics are over the tokens in the forward pass, whatever the loss divides by.
    for name in active_metrics:
        if name.startswith(("policy/", "rollout/")):
            assert metrics[name] == pytest.approx(active_metrics[name], rel=1e-4), name


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_activations_give_the_same_gradient(make_tiny, family):
    tiny = make_tiny(family)
    experiences = learning.make_off_policy_experiences(tiny)
    calls = []
    layer = tiny.policy.model.model.language_model.layers[0].mlp
    # The check at the start makes a pass without gradient first, for the routes of experts.
    layer.register_forward_pre_hook(lambda *_: calls.append(1) if torch.is_grad_enabled() else None)
    _, kept = learning.step_gradient(tiny, experiences)
    once = len(calls)
    tiny.policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, recomputed = learning.step_gradient(tiny, experiences)
    assert len(calls) - once == 2 * once
    assert learning.relative_difference(recomputed, kept) < GRADIENTS
    assert learning.make_off_policy_experiences(tiny) == experiences  # sampling does not change either
