"""Every objective, through a real model: the gradient of a step does not depend on how the step is cut into batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from objectives import LOSSES
from rounding import GRADIENTS

from mmrl.config.schema import LossCoefficientConfig, LossConfig, OptimizerConfig, SftLossConfig
from mmrl.learner.learner import LearnerConfig, PolicyLearner
from mmrl.learner.loss import Objective
from mmrl.types import Author, Experience, FinishReason, Segment


class Accumulate:
    """An optimizer that keeps the gradient and leaves the weights alone."""

    def backward(self, loss, *, last):
        loss.backward()

    def update(self, lr):
        return {}


@pytest.fixture(scope="module")
def tiny(make_tiny):
    return make_tiny()


@pytest.fixture(scope="module")
def reference(tiny):
    copy = tiny.policy.frozen_copy()
    with torch.no_grad():
        for parameter in copy.model.parameters():
            parameter.mul_(1.05)
    return copy


@pytest.fixture(scope="module")
def trained_on(tiny):
    """Five groups of four, a little off the sampler; some with a forced trigger, some cut, one group idle."""
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:5]]
    made = []
    for g, group in enumerate(tiny.sampler().generate(prompts, 4, tiny.params, step=0)):
        for i, rollout in enumerate(group):
            (segment,) = rollout.segments
            moved = tuple(logp + 0.15 * ((7 * i + 3 * t + g) % 5 - 2) for t, logp in enumerate(segment.logprobs))
            segments = (replace(segment, logprobs=moved),)
            if (g + i) % 3 == 0:
                forced = Segment(token_ids=segment.token_ids[:2], logprobs=(0.0, 0.0), author=Author.FORCED)
                segments = (*segments, forced, replace(segment, logprobs=moved))
            finish = FinishReason.LENGTH if (g + i) % 4 == 0 else FinishReason.EOS
            advantage = (i - 1.2) * (g + 1) / 3 if g != 2 else 0.0
            changed = replace(
                rollout, segments=segments, finish_reason=finish, is_correct=len(segments) > 1 and i % 2 == 0
            )
            made.append(Experience(rollout=changed, advantage=advantage))
    lesson = tiny.processor.build_demonstration(prompts[0], prompts[0].sample.target)
    return [*made, Experience(rollout=replace(lesson, sampling_params=tiny.params), advantage=0.0)]


def gradient(tiny, trained_on, loss, reference, *, micro_batch=8, shared_prefix=True):
    plan = LearnerConfig(
        loss=loss,
        optimizer=OptimizerConfig(),
        total_steps=4,
        micro_batch_groups=micro_batch,
        micro_batch_tokens=10_000,
        epochs=1,
        shared_prefix=shared_prefix,
        pad_id=tiny.eos_id,
    )
    tiny.policy.model.zero_grad()
    reference = reference if loss.kl.coef else None
    metrics = PolicyLearner(tiny.policy, tiny.processor, Accumulate(), plan, reference).step(trained_on, step=1)
    found = [p.grad.flatten().clone() for p in tiny.policy.model.parameters() if p.grad is not None]
    return metrics, torch.cat(found)


def distance(a, b):
    assert float(b.norm()) > 0
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_gradient_does_not_depend_on_batching_order_padding_or_shared_prefix(tiny, reference, trained_on, loss):
    siblings = [e for start in range(0, 20, 4) for e in reversed(trained_on[start : start + 4])] + trained_on[20:]
    groups = [e for start in range(16, -1, -4) for e in trained_on[start : start + 4]] + trained_on[20:]
    metrics, whole = gradient(tiny, trained_on, loss, reference)
    for experiences, cut in (
        (trained_on, {"micro_batch": 1}),
        (siblings, {"micro_batch": 2}),
        (groups, {"micro_batch": 4}),
        (trained_on, {"micro_batch": 2, "shared_prefix": False}),
    ):
        again, parts = gradient(tiny, experiences, loss, reference, **cut)
        assert distance(parts, whole) < GRADIENTS, cut
        assert again == pytest.approx(metrics, rel=1e-4, abs=1e-6), cut


@pytest.mark.parametrize("name", ["algorithm grpo", "algorithm gspo", "algorithm rloo", "nll"])
def test_the_comparison_can_fail(tiny, trained_on, monkeypatch, name):
    """Denominators of a micro-batch instead of the step: the mistake that this suite is for."""
    honest = Objective.__call__

    def local(self, tokens, denominators, **options):
        return honest(self, tokens, self.count_denominators(tokens.experiences), **options)

    _, whole = gradient(tiny, trained_on, LOSSES[name], None)
    monkeypatch.setattr(Objective, "__call__", local)
    _, parts = gradient(tiny, trained_on, LOSSES[name], None, micro_batch=1)
    assert distance(parts, whole) > 0.1


def test_imitation_of_continuations_does_not_depend_on_advantages(tiny, trained_on):
    """What it adds to the gradient is the same where all of a group are right, and no advantage is left."""
    with_it = LOSSES["nll after a trigger"]
    without = with_it.model_copy(update={"sft_loss": SftLossConfig()})
    even = [replace(experience, advantage=0.0) for experience in trained_on]
    (_, more), (_, less), (_, alone), (_, nothing) = (
        gradient(tiny, experiences, loss, None) for experiences in (trained_on, even) for loss in (with_it, without)
    )
    assert distance(more - less, alone - nothing) < 1e-4


def test_the_entropy_bonus_has_the_gradient_of_the_entropy(tiny, trained_on):
    """Against logits of the plain forward of one response, banned tokens left out of the sum."""
    rollout = replace(trained_on[9].rollout, segments=trained_on[9].rollout.segments[:1])  # text alone
    assert not rollout.prompt.sample.media
    bonus = LossConfig(entropy=LossCoefficientConfig(coef=0.7))
    _, ours = gradient(tiny, [Experience(rollout=rollout, advantage=0.0)], bonus, None)
    tiny.policy.model.zero_grad()
    completion = rollout.segments[0].token_ids
    logits = tiny.policy.model(input_ids=torch.tensor([[*rollout.prompt.token_ids, *completion]])).logits[0]
    allowed = [i for i in range(logits.shape[-1]) if i not in rollout.sampling_params.banned_token_ids]
    start = len(rollout.prompt.token_ids) - 1
    chosen = torch.distributions.Categorical(logits=logits[start : start + len(completion)][:, allowed])
    (-0.7 * chosen.entropy().mean()).backward()
    theirs = torch.cat([p.grad.flatten() for p in tiny.policy.model.parameters() if p.grad is not None])
    assert torch.isfinite(ours).all()
    assert distance(ours[ours != 0], theirs[theirs != 0]) < GRADIENTS
