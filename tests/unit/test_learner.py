"""One learning step: the penalty against an oracle, repeated epochs, and steps that teach nothing."""

import math
from dataclasses import replace

import pytest
import torch

from mmrl.algo.kl import k3
from mmrl.batch import by_prompt, collate
from mmrl.config.schema import Loss, Optimizer
from mmrl.learner.engine_torch import TorchEngine
from mmrl.learner.learner import GrpoLearner, LearnPlan
from mmrl.types import Author, Experience, Segment


def learner(world, *, lr=1e-3, reference=None, engine=None, epochs=1, steps=4, **loss):
    optimizer = Optimizer(lr=lr)
    plan = LearnPlan(
        loss=Loss(**loss),
        optimizer=optimizer,
        total_steps=steps,
        micro_batch=2,
        token_budget=10_000,
        epochs=epochs,
        shared_prefix=True,
        pad_id=world.eos_id,
    )
    engine = engine or TorchEngine(world.policy.trainable, optimizer)
    return GrpoLearner(world.policy, world.processor, engine, plan, reference)


def taught(world, advantages=(1.0, -1.0, 0.5)):
    prompts = [world.processor.ask(sample) for sample in world.samples[:3]]
    groups = world.sampler().generate(prompts, len(advantages), world.law, step=0)
    return [
        Experience(rollout=rollout, advantage=advantage)
        for group in groups
        for rollout, advantage in zip(group, advantages, strict=True)
    ]


def weights(world):
    return {name: value.clone() for name, value in world.policy.model.state_dict().items()}


def same(before, after):
    return all(torch.equal(before[name], after[name]) for name in before)


def log_probs(policy, world, experiences):
    """Log-probs of the policy's tokens, one vector."""
    batch = collate(by_prompt(experiences), world.processor, pad_id=world.eos_id, shared_prefix=False)
    with torch.no_grad():
        return policy.score(batch).logps_N[batch.policy_N]


def test_the_penalty_equals_its_oracle(tiny):
    world = tiny()
    experiences = taught(world, advantages=(0.0, 0.0))
    reference = world.policy.frozen_copy()
    with torch.no_grad():
        for parameter in reference.model.parameters():
            parameter.mul_(1.1)
    expected = k3(log_probs(world.policy, world, experiences), log_probs(reference, world, experiences)).mean()
    before = weights(world)
    metrics = learner(world, reference=reference, kl_coef=0.5).learn(experiences, step=0)
    assert expected > 1e-3
    assert metrics["learner/kl_nats"] == pytest.approx(float(expected), rel=1e-4)
    assert metrics["learner/loss"] == pytest.approx(0.5 * float(expected), rel=1e-4)  # advantages are 0
    assert metrics["learner/skipped_frac"] == 0.0
    assert not same(before, weights(world))


def test_a_fresh_reference_costs_nothing_and_never_changes(tiny):
    world = tiny()
    reference = world.policy.frozen_copy()
    before = {name: value.clone() for name, value in reference.model.state_dict().items()}
    metrics = learner(world, reference=reference, kl_coef=0.5).learn(taught(world), step=0)
    assert metrics["learner/kl_nats"] == pytest.approx(0.0, abs=1e-6)
    assert same(before, reference.model.state_dict())
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())


@pytest.mark.parametrize(("kl_coef", "given"), [(0.0, True), (0.1, False)])
def test_a_penalty_needs_a_reference_and_the_other_way_round(tiny, kl_coef, given):
    world = tiny()
    with pytest.raises(ValueError, match=f"kl_coef {kl_coef} and a {'given' if given else 'missing'} reference"):
        learner(world, reference=world.policy if given else None, kl_coef=kl_coef)


def test_on_policy_metrics(tiny):
    world = tiny()
    metrics = learner(world).learn(taught(world), step=0)
    assert metrics["learner/clipped_frac"] == 0.0
    assert metrics["learner/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["rollout/logp_gap_nats"] < 1e-5
    assert 0.0 < metrics["learner/entropy_nats"] <= math.log(330)
    assert metrics["learner/skipped_updates"] == 0.0
    assert metrics["learner/grad_norm"] > 0.0


@pytest.mark.parametrize("step", [0, 3])
def test_a_step_without_advantage_updates_nothing(tiny, step):
    world = tiny()
    engine = TorchEngine(world.policy.trainable, Optimizer(weight_decay=0.1))
    before = weights(world)
    idle = learner(world, engine=engine)
    assert idle.learn(taught(world, advantages=(0.0, 0.0)), step=step) == {
        "learner/lr": 1e-3,
        "learner/skipped_frac": 1.0,
    }
    assert idle.learn([], step=step) == {"learner/lr": 1e-3, "learner/skipped_frac": 0.0}
    assert same(before, weights(world))
    assert engine.state()["optimizer"]["state"] == {}


def test_several_epochs_step_again_and_really_clip(tiny):
    once, thrice = tiny(), tiny()
    first = learner(once, lr=0.02).learn(taught(once), step=0)
    third = learner(thrice, lr=0.02, epochs=3).learn(taught(thrice), step=0)
    assert first["learner/clipped_frac"] == 0.0
    assert third["learner/clipped_frac"] > 0.2
    assert third["rollout/logp_gap_nats"] == first["rollout/logp_gap_nats"] < 1e-5  # of the first epoch
    assert not same(weights(once), weights(thrice))


def test_what_is_clipped_has_no_gradient(tiny):
    """Behaviour log-probs far below the policy's: every ratio is beyond the bound of a positive advantage."""
    world = tiny()
    far = []
    for each in taught(world, advantages=(1.0, 2.0)):
        (segment,) = each.rollout.segments
        older = replace(segment, logps=tuple(logp - 1.0 for logp in segment.logps))
        far.append(replace(each, rollout=replace(each.rollout, segments=(older,))))
    metrics = learner(world).learn(far, step=0)
    assert metrics["learner/clipped_frac"] == pytest.approx(1.0)
    assert metrics["learner/grad_norm"] == 0.0
    assert metrics["learner/ratio_max"] == pytest.approx(math.e, rel=1e-3)
    back = [replace(each, advantage=-each.advantage) for each in far]
    assert learner(world).learn(back, step=0)["learner/grad_norm"] > 0.0  # the other side is not bounded


def test_the_largest_ratio_is_that_of_the_policys_tokens(tiny):
    """Padding and forced tokens have no ratio; they must not show as 1."""
    world = tiny()
    (first, *_) = taught(world)
    (segment,) = first.rollout.segments
    newer = replace(segment, logps=tuple(logp + 1.0 for logp in segment.logps))
    forced = Segment(ids=segment.ids[:2], logps=(0.0, 0.0), author=Author.TRIGGER)
    rollout = replace(first.rollout, segments=(newer, forced))
    metrics = learner(world).learn([Experience(rollout=rollout, advantage=-1.0)], step=0)
    assert metrics["learner/ratio_max"] == pytest.approx(1 / math.e, rel=1e-3)


class Flaky:
    """Norms as given, weights untouched."""

    def __init__(self, *norms):
        self.norms = list(norms)

    def backward(self, loss):
        pass

    def step(self, lr):
        return self.norms.pop(0)


def test_an_update_left_out_is_counted_in_whichever_epoch(tiny):
    world = tiny()
    metrics = learner(world, engine=Flaky(math.nan, math.inf, 1.0), epochs=3).learn(taught(world), step=0)
    assert metrics["learner/skipped_updates"] == 2.0
    assert metrics["learner/grad_norm"] == 1.0


def test_the_rate_is_the_schedules(tiny):
    world = tiny()
    plan = LearnPlan(
        loss=Loss(),
        optimizer=Optimizer(lr=1.0, warmup_steps=2, decay="linear"),
        total_steps=5,
        micro_batch=1,
        token_budget=10_000,
        epochs=1,
        shared_prefix=False,
        pad_id=world.eos_id,
    )
    teacher = GrpoLearner(world.policy, world.processor, Flaky(), plan)
    rates = [teacher.learn([], step=step)["learner/lr"] for step in range(5)]
    assert rates == pytest.approx([0.5, 1.0, 2 / 3, 1 / 3, 0.0])


def test_imitation_raises_the_likelihood_of_the_demonstrations(tiny):
    world = tiny()
    prompts = [world.processor.ask(sample) for sample in world.samples[:4]]
    lessons = [Experience(rollout=world.processor.demonstrate(p, p.sample.target), advantage=0.0) for p in prompts]
    teacher = learner(world, lr=0.01)
    losses = [teacher.learn(lessons, step=step)["learner/loss"] for step in range(4)]
    assert losses[3] < losses[0] - 0.5
