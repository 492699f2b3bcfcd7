"""The gradient of a step depends on what is learned, not on how it is cut into batches; and it is the right one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rounding import GRADIENTS

from mmrl.config.schema import KlConfig, LossConfig, OptimizerConfig
from mmrl.learner.learner import LearnerConfig, PolicyLearner
from mmrl.policy.families import FAMILIES
from mmrl.types import Author, Experience, ImageRef, Segment, VideoRef


class Accumulate:
    """An optimizer that keeps the gradient and leaves the weights alone."""

    def backward(self, loss, *, last):
        loss.backward()

    def update(self, lr):
        return {}


def experiences(tiny, group_size=4, teacher=False, sampler=None):
    """Rollouts whose behaviour policy differs a little from the current one, so that ratios are not 1."""
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:5]]
    made = []
    sampler = sampler or tiny.sampler()
    for g, group in enumerate(sampler.generate(prompts, group_size, tiny.params, step=0)):
        for i, rollout in enumerate(group):
            (segment,) = rollout.segments
            moved = tuple(logp + 0.15 * ((7 * i + 3 * t + g) % 5 - 2) for t, logp in enumerate(segment.logprobs))
            older = replace(rollout, segments=(replace(segment, logprobs=moved),))
            made.append(Experience(rollout=older, advantage=(i - 1.2) * (g + 1) / 3))
    if teacher:
        lessons = [tiny.processor.build_demonstration(prompt, prompt.sample.target) for prompt in prompts]
        made += [Experience(rollout=replace(lesson, sampling_params=tiny.params), advantage=0.0) for lesson in lessons]
    return made


def gradient(tiny, trained_on, *, micro_batch=100, token_budget=10_000, shared_prefix=True, kl_coef=0.0, epochs=1):
    plan = LearnerConfig(
        loss=LossConfig(kl=KlConfig(coef=kl_coef)),
        optimizer=OptimizerConfig(),
        total_steps=1,
        micro_batch_groups=micro_batch,
        micro_batch_tokens=token_budget,
        epochs=epochs,
        shared_prefix=shared_prefix,
        pad_id=tiny.eos_id,
    )
    reference = None
    if kl_coef:
        reference = tiny.policy.frozen_copy()
        with torch.no_grad():
            for parameter in reference.trained.values():
                parameter.mul_(1.05)
    tiny.policy.model.zero_grad()
    metrics = PolicyLearner(tiny.policy, tiny.processor, Accumulate(), plan, reference).step(trained_on, step=0)
    return metrics, {n: p.grad.clone() for n, p in tiny.policy.model.named_parameters() if p.grad is not None}


def difference(a, b):
    assert a.keys() == b.keys()
    square = sum(float(((a[n] - b[n]) ** 2).sum()) for n in a)
    return (square / sum(float((g**2).sum()) for g in a.values())) ** 0.5


def test_odd_batches_have_one_gradient_too(make_tiny):
    """A group of one, one of two, responses of one token and of none, a prompt without a picture among ones with."""
    tiny = make_tiny()
    one, _, _, _, two, other, _, _, *rest = experiences(tiny)
    shortened = [cut(experience, tokens) for experience, tokens in zip(rest, (1, 1, 0, 2), strict=False)]
    trained_on = [one, two, other, *shortened, *rest[4:]]
    told, whole = gradient(tiny, trained_on)
    for options in ({"micro_batch": 1}, {"shared_prefix": False}, {"token_budget": 1}):
        again, parts = gradient(tiny, trained_on, **options)
        assert difference(whole, parts) < GRADIENTS
        assert again == pytest.approx(told, rel=1e-4, abs=1e-6)


def cut(experience, tokens):
    """An experience whose response ends early."""
    (segment,) = experience.rollout.segments
    segment = replace(segment, token_ids=segment.token_ids[:tokens], logprobs=segment.logprobs[:tokens])
    return replace(experience, rollout=replace(experience.rollout, segments=(segment,)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_gradient_does_not_depend_on_batching(make_tiny, family, kl_coef):
    tiny = make_tiny(family)
    trained_on = experiences(tiny, teacher=True)
    metrics, whole = gradient(tiny, trained_on, kl_coef=kl_coef)
    assert any("visual" in name for name in whole)
    assert metrics["policy/clip_frac"] > 0
    for micro_batch in (1, 2, 4):
        again, parts = gradient(tiny, trained_on, micro_batch=micro_batch, kl_coef=kl_coef)
        assert difference(whole, parts) < GRADIENTS
        assert again == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    for token_budget in (1, 150):  # of the second, some groups are split
        again, parts = gradient(tiny, trained_on, token_budget=token_budget, kl_coef=kl_coef)
        assert difference(whole, parts) < GRADIENTS
        assert again == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    _, plain = gradient(tiny, trained_on, shared_prefix=False, micro_batch=2, kl_coef=kl_coef)
    assert difference(whole, plain) < GRADIENTS


def test_gradient_does_not_depend_on_order(make_tiny):
    tiny = make_tiny()
    trained_on = experiences(tiny)
    _, whole = gradient(tiny, trained_on)
    siblings = [e for start in range(0, len(trained_on), 4) for e in reversed(trained_on[start : start + 4])]
    _, swapped = gradient(tiny, siblings)
    _, backwards = gradient(tiny, trained_on[::-1], micro_batch=2)
    assert difference(whole, swapped) < GRADIENTS
    assert difference(whole, backwards) < GRADIENTS


def test_gradient_does_not_depend_on_padding(make_tiny):
    """One long prompt and one long response in the batch pad all others."""
    tiny = make_tiny()
    trained_on = experiences(tiny)
    _, alone = gradient(tiny, trained_on, micro_batch=1, shared_prefix=False)
    _, padded = gradient(tiny, trained_on, micro_batch=100, shared_prefix=False)
    assert difference(alone, padded) < GRADIENTS


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rethought", [False, True], ids=["drawn at once", "continued after a trigger"])
def test_loss_and_gradient_equal_a_slow_independent_version(make_tiny, family, rethought):
    """One sequence at a time, token by token, with position ids counted out and no code of ours in between."""
    tiny = make_tiny(family)
    trained_on = experiences(tiny)
    trained_on = [add_continuation(e) if rethought else e for e in trained_on]
    metrics, ours = gradient(tiny, trained_on)
    tiny.policy.model.zero_grad()
    total = sum(len(s.token_ids) for e in trained_on for s in e.rollout.segments if s.author is Author.POLICY)
    loss = sum(_slow_surrogate(tiny, experience) for experience in trained_on) / total
    loss.backward()
    theirs = {n: p.grad for n, p in tiny.policy.model.named_parameters() if p.grad is not None}
    assert metrics["learner/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert difference(ours, theirs) < GRADIENTS


def add_continuation(experience):
    """The response cut in two, with a trigger between, the second part drawn at another temperature."""
    rollout = experience.rollout
    (whole,) = rollout.segments
    first = replace(whole, token_ids=whole.token_ids[:2], logprobs=whole.logprobs[:2])
    second = replace(
        whole,
        token_ids=whole.token_ids[2:],
        logprobs=whole.logprobs[2:],
        sampling_params=replace(rollout.sampling_params, temperature=0.6),
    )
    trigger = Segment(
        token_ids=(*first.token_ids, *first.token_ids[:1]),
        logprobs=(0.0,) * (len(first.token_ids) + 1),
        author=Author.FORCED,
    )
    return replace(experience, rollout=replace(rollout, segments=(first, trigger, second)))


def _slow_surrogate(tiny, experience):
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
        if grids := [
            grid for ref, grid in zip(prompt.sample.media, prompt.grids, strict=True) if isinstance(ref, kind)
        ]:
            media |= {name: patches, f"{modality}_grid_thw": torch.tensor(grids)}
    logits = tiny.policy.model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        position_ids=_slow_positions(tiny, ids[0].tolist(), prompt),
        mm_token_type_ids=tiny.processor.placeholders.token_types(ids),
        **media,
    ).logits[0]
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


def _slow_positions(tiny, ids, prompt):
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


def test_likelihood_of_a_teacher_equals_transformers_loss(make_tiny):
    tiny = make_tiny()
    prompt = tiny.processor.build(tiny.samples[0])
    lesson = tiny.processor.build_demonstration(prompt, prompt.sample.target)
    metrics, _ = gradient(tiny, [Experience(rollout=lesson, advantage=0.0)])
    ids = torch.tensor([[*prompt.token_ids, *lesson.segments[0].token_ids]])
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


def test_only_the_policys_own_tokens_carry_the_policy_term(make_tiny):
    """A trigger between two segments is context, not a lesson: its log-prob has no gradient and no weight."""
    tiny = make_tiny()
    prompt = tiny.processor.build(tiny.samples[0])
    rollout = tiny.sampler().generate([prompt], 1, tiny.params, step=0)[0][0]
    forced = Segment(token_ids=rollout.segments[0].token_ids[:3], logprobs=(0.0,) * 3, author=Author.FORCED)
    both = replace(rollout, segments=(rollout.segments[0], forced))
    _, without = gradient(tiny, [Experience(rollout=rollout, advantage=1.0)])
    _, with_trigger = gradient(tiny, [Experience(rollout=both, advantage=1.0)])
    assert difference(without, with_trigger) < GRADIENTS
    only = replace(rollout, segments=(forced,))
    metrics, nothing = gradient(tiny, [Experience(rollout=only, advantage=1.0)])
    assert nothing == {}
    assert metrics["learner/no_gradient_frac"] == 1.0


def test_rollouts_without_advantage_are_not_run_but_count(make_tiny):
    tiny = make_tiny()
    trained_on = experiences(tiny)
    idle = [replace(e, advantage=0.0) if i % 4 == 1 else e for i, e in enumerate(trained_on)]
    metrics, skipping = gradient(tiny, idle)
    assert metrics["learner/no_gradient_frac"] == 0.25
    tokens = sum(e.rollout.num_tokens for e in idle)
    active = [e for e in idle if e.advantage]
    _, alone = gradient(tiny, active)
    scale = sum(e.rollout.num_tokens for e in active) / tokens
    assert difference(skipping, {n: g * scale for n, g in alone.items()}) < GRADIENTS


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_activations_give_the_same_gradient(make_tiny, family):
    tiny = make_tiny(family)
    trained_on = experiences(tiny)
    calls = []
    layer = tiny.policy.model.model.language_model.layers[0].mlp
    # The check at the start makes a pass without gradient first, for the routes of experts.
    layer.register_forward_pre_hook(lambda *_: calls.append(1) if torch.is_grad_enabled() else None)
    _, kept = gradient(tiny, trained_on)
    once = len(calls)
    tiny.policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, recomputed = gradient(tiny, trained_on)
    assert len(calls) - once == 2 * once
    assert difference(kept, recomputed) < GRADIENTS
    assert ids_of(experiences(tiny)) == ids_of(trained_on)


def ids_of(trained_on):
    return [experience.rollout.segments[0].token_ids for experience in trained_on]
