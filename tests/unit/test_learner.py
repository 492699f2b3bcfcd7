"""One learning step: the penalty against an oracle, repeated epochs, and steps that teach nothing."""

import copy
import math
from dataclasses import replace
from itertools import chain

import pytest
import torch
from rounding import LOGPROBS
from samplers import hf_sampler

from mmrl.algo.losses import estimate_kl
from mmrl.config.schema import (
    HealthConfig,
    KlConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    RolloutCorrectionConfig,
)
from mmrl.config.schema.presets import ALGORITHM_PRESETS
from mmrl.learner.learner import LearnerConfig, PolicyLearner
from mmrl.learner.optimizer_torch import TorchOptimizer
from mmrl.policy.batch import collate, group_by_prompt
from mmrl.policy.families import FAMILIES
from mmrl.policy.lora import create_adapter
from mmrl.policy.policy import Policy
from mmrl.training.callbacks import StepResult
from mmrl.training.health import HealthMonitor
from mmrl.types import Author, Experience, FinishReason, Segment, SelectedExperiences, TrainingState


def learner(
    tiny,
    *,
    lr=1e-3,
    reference=None,
    optimizer=None,
    epochs=1,
    mini_batches=1,
    micro_batch=2,
    shared_prefix=True,
    **loss,
):
    options = OptimizerConfig(lr=lr)
    plan = LearnerConfig(
        loss=LossConfig(**loss),
        optimizer=options,
        total_steps=4,
        micro_batch_groups=micro_batch,
        micro_batch_tokens=10_000,
        epochs=epochs,
        shared_prefix=shared_prefix,
        pad_id=tiny.eos_id,
        mini_batches=mini_batches,
    )
    optimizer = optimizer or TorchOptimizer(tiny.policy.trained_by_component, options)
    return PolicyLearner(tiny.policy, tiny.processor, optimizer, plan, reference)


def trained_on(tiny, advantages=(1.0, -1.0, 0.5)):
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:3]]
    groups = tiny.sampler().generate(prompts, len(advantages), tiny.params, step=0)
    return [
        Experience(rollout=rollout, advantage=advantage)
        for group in groups
        for rollout, advantage in zip(group, advantages, strict=True)
    ]


def weights(tiny):
    return {name: value.clone() for name, value in tiny.policy.model.state_dict().items()}


def same(before, after):
    return all(torch.equal(before[name], after[name]) for name in before)


def log_probs(policy, tiny, experiences):
    """Log-probs of the policy's tokens, one vector."""
    batch = collate(group_by_prompt(experiences), tiny.processor, pad_id=tiny.eos_id, shared_prefix=False)
    with torch.no_grad():
        logprobs_N = policy.compute_logprobs(batch).logprobs_N
    segments = [segment for group in group_by_prompt(experiences) for e in group for segment in e.rollout.segments]
    authors = [s.author for s in segments if s.author in (Author.POLICY, Author.DEMONSTRATION) for _ in s.token_ids]
    return logprobs_N[torch.tensor([author is Author.POLICY for author in authors])]


def test_the_penalty_equals_its_oracle(make_tiny):
    tiny = make_tiny()
    experiences = trained_on(tiny, advantages=(0.0, 0.0))
    reference = tiny.policy.frozen_copy()
    with torch.no_grad():
        for parameter in reference.model.parameters():
            parameter.mul_(1.1)
    logps, ref_logps = (log_probs(policy, tiny, experiences) for policy in (tiny.policy, reference))
    expected = estimate_kl(logps, ref_logps, "k3").mean()
    before = weights(tiny)
    metrics = learner(tiny, reference=reference, kl=KlConfig(coef=0.5)).step(experiences, step=0)
    assert expected > 1e-3
    assert metrics["policy/reference_kl_nats"] == pytest.approx(float(expected), rel=1e-4)
    assert metrics["learner/loss"] == pytest.approx(0.5 * float(expected), rel=1e-4)  # advantages are 0
    assert metrics["learner/no_gradient_frac"] == 0.0
    assert not same(before, weights(tiny))


def test_a_fresh_reference_costs_nothing_and_never_changes(make_tiny):
    tiny = make_tiny()
    reference = tiny.policy.frozen_copy()
    before = {name: value.clone() for name, value in reference.model.state_dict().items()}
    metrics = learner(tiny, reference=reference, kl=KlConfig(coef=0.5)).step(trained_on(tiny), step=0)
    assert metrics["policy/reference_kl_nats"] == pytest.approx(0.0, abs=1e-6)
    assert same(before, reference.model.state_dict())
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())


@pytest.mark.parametrize(("kl_coef", "given"), [(0.0, True), (0.1, False)])
def test_a_penalty_needs_a_reference_and_the_other_way_round(make_tiny, kl_coef, given):
    tiny = make_tiny()
    with pytest.raises(ValueError, match=f"kl.coef {kl_coef} and a {'given' if given else 'missing'} reference"):
        learner(tiny, reference=tiny.policy if given else None, kl=KlConfig(coef=kl_coef))


def test_on_policy_metrics(make_tiny):
    tiny = make_tiny()
    metrics = learner(tiny).step(trained_on(tiny), step=0)
    assert metrics["policy/clip_frac"] == 0.0
    assert metrics["policy/importance_ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["rollout/logprob_diff_mean"] < LOGPROBS
    assert 0.0 < metrics["policy/entropy_nats"] <= math.log(330)
    assert metrics["learner/nonfinite_updates"] == 0.0
    by_role = [metrics[f"learner/grad_norm/{role}"] for role in ("vision", "projector", "language")]
    assert min(by_role) > 0.0
    assert metrics["learner/grad_norm"] == pytest.approx(math.hypot(*by_role))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_component_learns_at_a_rate_of_its_own(make_tiny, family):
    tiny = make_tiny(family)
    rates = {"vision": 1e-5, "projector": 1e-4, "language": 1e-3}
    options = OptimizerConfig(lr=1e-3, lr_by_component={name: rates[name] for name in ("vision", "projector")})
    optimizer = TorchOptimizer(tiny.policy.trained_by_component, options)
    before = weights(tiny)
    metrics = learner(tiny, optimizer=optimizer).step(trained_on(tiny), step=0)
    for component, rate in rates.items():
        names = [name for name in tiny.policy.trained if tiny.policy.family.component_of(name) == component]
        moved = max(float((tiny.policy.trained[name].detach() - before[name]).abs().max()) for name in names)
        assert metrics[f"learner/grad_norm/{component}"] > 0
        assert moved == pytest.approx(rate, rel=0.01)  # Adam's first step is one of the rate


@pytest.mark.parametrize("step", [0, 3])
def test_a_step_without_advantage_updates_nothing(make_tiny, step):
    tiny = make_tiny()
    optimizer = TorchOptimizer(tiny.policy.trained_by_component, OptimizerConfig(weight_decay=0.1))
    before = weights(tiny)
    idle = learner(tiny, optimizer=optimizer)
    assert idle.step(trained_on(tiny, advantages=(0.0, 0.0)), step=step) == {
        "learner/lr": 1e-3,
        "learner/no_gradient_frac": 1.0,
    }
    assert idle.step([], step=step) == {"learner/lr": 1e-3, "learner/no_gradient_frac": 0.0}
    assert same(before, weights(tiny))
    assert optimizer.state()["moments"] == {}


def test_a_replayed_rollout_is_compared_with_whom_it_says(make_tiny):
    tiny = make_tiny()
    experiences = trained_on(tiny)
    learner(tiny, lr=0.02).step(experiences, step=0)  # the policy moves away from what sampled them
    ratios = {}
    for old, of_others in (("recorded", "recomputed"), ("recomputed", "recorded")):
        aged = [replace(experience, staleness=1, old_logprobs_source=old) for experience in experiences]
        metrics = learner(tiny, lr=1e-9, old_logprobs=of_others).step(aged, step=0)
        assert "rollout/logprob_diff_mean" not in metrics
        ratios[old] = metrics["policy/importance_ratio_min"], metrics["policy/importance_ratio_max"]
    assert ratios["recomputed"] == pytest.approx((1.0, 1.0))
    assert ratios["recorded"][0] < 0.95 and ratios["recorded"][1] > 1.05


def test_several_epochs_step_again_and_really_clip(make_tiny):
    once, thrice = make_tiny(), make_tiny()
    first = learner(once, lr=0.02).step(trained_on(once), step=0)
    third = learner(thrice, lr=0.02, epochs=3).step(trained_on(thrice), step=0)
    assert first["policy/clip_frac"] == 0.0
    assert third["policy/clip_frac"] > 0.2
    assert third["rollout/logprob_diff_mean"] == first["rollout/logprob_diff_mean"] < LOGPROBS  # of the first epoch
    assert not same(weights(once), weights(thrice))


def test_mini_batches_are_steps_of_their_own(make_tiny):
    """Three groups in two mini-batches: what two learners do that share an optimizer, the second given one group."""
    split, slow = make_tiny(), make_tiny()
    experiences = trained_on(slow)
    first, second, third = group_by_prompt(experiences)
    optimizer = TorchOptimizer(slow.policy.trained_by_component, OptimizerConfig(lr=0.02))
    steps = [
        learner(slow, lr=0.02, optimizer=optimizer, entropy={"coef": 0.01}).step(part, step=0)
        for part in ([*first, *third], second)
    ]
    metrics = learner(split, lr=0.02, mini_batches=2, entropy={"coef": 0.01}).step(trained_on(split), step=0)
    assert same(weights(slow), weights(split))
    assert metrics["learner/loss"] == pytest.approx(sum(step["learner/loss"] for step in steps) / 2)
    assert metrics["policy/importance_ratio_max"] == max(step["policy/importance_ratio_max"] for step in steps) > 1.01
    assert metrics["rollout/logprob_diff_mean"] == steps[0]["rollout/logprob_diff_mean"] < LOGPROBS


def test_a_mini_batch_that_teaches_nothing_is_no_step(make_tiny):
    tiny = make_tiny()
    experiences = [replace(each, advantage=0.0) for each in trained_on(tiny)[:3]] + trained_on(tiny)[3:]
    metrics = learner(tiny, optimizer=Flaky(math.nan, 1.0, 0.5), mini_batches=3, epochs=1).step(experiences, step=0)
    assert metrics["learner/nonfinite_updates"] == 1.0  # two steps, of which the first is not finite
    assert metrics["learner/no_gradient_frac"] == pytest.approx(1 / 3)


class Sgd:
    """Plain gradient descent, in which small differences stay small."""

    def __init__(self, tiny):
        self.parameters = list(tiny.policy.trained.values())

    def backward(self, loss, *, last):
        loss.backward()

    @torch.no_grad()
    def update(self, lr):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.sub_(lr * gradient)
            parameter.grad = None
        return {"language": float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())}


def by_hand(tiny, experiences, *, lr, mini_batches, epochs=1, bound=None):
    """PPO as papers have it: old log-probs of the whole step, then an update for each part; `bound` is that of TIS.

    Returns the ratios of each update, and its loss.
    """
    optimizer, groups = Sgd(tiny), group_by_prompt(experiences)
    parts = [list(chain.from_iterable(groups[start::mini_batches])) for start in range(mini_batches)]
    olds, samplers = [], []
    for part in parts:
        # In the order of `log_probs`, group after group; these have one segment each.
        recorded = torch.tensor([logp for e in part for logp in e.rollout.segments[0].logprobs])
        own = log_probs(tiny.policy, tiny, part)
        taken = [e.old_logprobs_source == "recorded" for e in part for _ in e.rollout.segments[0].logprobs]
        olds.append(torch.where(torch.tensor(taken), recorded, own))
        samplers.append(recorded)
    ratios, losses = [], []
    for _ in range(epochs):
        for part, old, sampler in zip(parts, olds, samplers, strict=True):
            batch = collate(group_by_prompt(part), tiny.processor, pad_id=tiny.eos_id, shared_prefix=False)
            ratio = (tiny.policy.compute_logprobs(batch).logprobs_N - old).exp()
            advantage = torch.tensor([e.advantage for e in part for _ in e.rollout.segments[0].logprobs])
            weight = (old - sampler).exp().clamp(max=bound) if bound else torch.ones_like(old)
            loss = -(weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)).mean()
            optimizer.backward(loss, last=True)
            optimizer.update(lr)
            ratios.append(ratio.detach())
            losses.append(float(loss.detach()))
    return ratios, losses


MINI_BATCHES = {
    "in rows": {"shared_prefix": False},
    "packed": {},
    "two epochs": {"epochs": 2},
    "truncated weights": {"rollout_correction": RolloutCorrectionConfig(method="tis", high=1.5)},
}


@pytest.mark.parametrize("options", MINI_BATCHES.values(), ids=MINI_BATCHES)
@pytest.mark.parametrize("adapter", [None, LoraConfig(rank=4, targets=("language.attention", "vision.mlp"))])
def test_old_log_probs_of_every_mini_batch_are_those_before_the_first_update(make_tiny, options, adapter):
    ours, slow = make_tiny(), make_tiny()
    if adapter is not None:
        for tiny in (ours, slow):
            create_adapter(tiny.policy.model, adapter, seed=0)
        ours, slow = (replace(tiny, policy=Policy(tiny.policy.model)) for tiny in (ours, slow))
    off = shifted(trained_on(slow), 0.5)
    lr, epochs = 0.3 if adapter else 0.05, options.get("epochs", 1)
    bound = 1.5 if "rollout_correction" in options else None
    ratios, losses = by_hand(slow, off, lr=lr, mini_batches=3, epochs=epochs, bound=bound)
    assert ratios[0].min() == pytest.approx(1.0, abs=1e-5) == ratios[0].max()
    assert all((ratio - 1.0).abs().max() > 0.01 for ratio in ratios[1:])

    before = log_probs(ours.policy, ours, off)
    metrics = learner(ours, lr=lr, optimizer=Sgd(ours), mini_batches=3, old_logprobs="recomputed", **options).step(
        off, step=0
    )
    last = torch.cat(ratios[-3:])
    assert metrics["policy/importance_ratio_max"] == pytest.approx(float(last.max()), rel=1e-4)
    assert metrics["policy/importance_ratio_min"] == pytest.approx(float(last.min()), rel=1e-4)
    assert metrics["learner/loss"] == pytest.approx(sum(losses[-3:]) / 3, rel=1e-3, abs=1e-6)
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(0.5, abs=1e-4)  # of the first update
    moved, expected = (log_probs(tiny.policy, tiny, off) - before for tiny in (ours, slow))
    assert (moved - expected).abs().max() < 1e-3 * expected.abs().max()


def test_only_what_needs_old_log_probs_of_the_learner_is_run_once_more(make_tiny, monkeypatch):
    """Replayed rollouts may want them where fresh ones do not; the first mini-batch has them from its own pass."""
    passes = []
    honest = Policy.compute_logprobs
    monkeypatch.setattr(
        Policy, "compute_logprobs", lambda self, *args: passes.append(torch.is_grad_enabled()) or honest(self, *args)
    )

    def step(replayed_source, **options):
        ours, slow = make_tiny(), make_tiny()
        off = shifted(trained_on(slow), 0.1)
        off = [replace(e, old_logprobs_source="recorded") for e in off[:6]] + [
            replace(e, staleness=2, old_logprobs_source=replayed_source) for e in off[6:]
        ]
        ratios, _ = by_hand(slow, off, lr=0.05, mini_batches=3)
        passes.clear()
        metrics = learner(ours, lr=0.05, optimizer=Sgd(ours), mini_batches=3, **options).step(off, step=0)
        everything = torch.cat(ratios)
        assert metrics["policy/importance_ratio_max"] == pytest.approx(float(everything.max()), rel=1e-4)
        assert metrics["policy/importance_ratio_min"] == pytest.approx(float(everything.min()), rel=1e-4)
        return passes.count(False), passes.count(True)

    check = 2  # of the shared prefix, in the learner's first step
    assert step("recorded") == (0, 3 + check)
    assert step("recomputed") == (2, 3 + check)


def test_a_penalty_in_the_reward_is_that_of_the_steps_start_in_every_mini_batch(make_tiny):
    tiny = make_tiny()
    reference = tiny.policy.frozen_copy()
    experiences = trained_on(tiny, advantages=(0.0, 0.0))
    in_reward = KlConfig(coef=1.0, estimator="k1", apply_to="reward")
    with torch.no_grad():
        for parameter in reference.model.parameters():
            parameter.mul_(1.05)
    start = log_probs(tiny.policy, tiny, experiences) - log_probs(reference, tiny, experiences)
    counts = torch.tensor([len(e.rollout.segments[0].token_ids) for e in experiences]).reshape(3, 2).sum(dim=1)
    expected = sum(float(part.mean()) for part in start.split(counts.tolist())) / 3
    metrics = learner(tiny, lr=0.05, optimizer=Sgd(tiny), reference=reference, kl=in_reward, mini_batches=3).step(
        experiences, step=0
    )
    # A mean of 4e-4 nats of both signs, so rounding moves it by 2e-4 of itself; the update moves it by 1e-2 or more.
    assert metrics["policy/reference_kl_nats"] == pytest.approx(expected, rel=1e-3)
    after = log_probs(tiny.policy, tiny, experiences) - log_probs(reference, tiny, experiences)
    assert abs(float(after.mean()) - expected) > 1e-2 * abs(expected)


def test_what_is_clipped_has_no_gradient(make_tiny):
    """Behaviour log-probs far below the policy's: every ratio is beyond the bound of a positive advantage."""
    tiny = make_tiny()
    far = []
    for each in trained_on(tiny, advantages=(1.0, 2.0)):
        (segment,) = each.rollout.segments
        older = replace(segment, logprobs=tuple(logp - 1.0 for logp in segment.logprobs))
        far.append(replace(each, rollout=replace(each.rollout, segments=(older,))))
    metrics = learner(tiny).step(far, step=0)
    assert metrics["policy/clip_frac"] == pytest.approx(1.0)
    assert metrics["learner/grad_norm"] == 0.0
    assert metrics["policy/importance_ratio_max"] == pytest.approx(math.e, rel=1e-3)
    back = [replace(each, advantage=-each.advantage) for each in far]
    assert learner(tiny).step(back, step=0)["learner/grad_norm"] > 0.0  # the other side is not bounded


def test_the_largest_ratio_is_that_of_the_policys_tokens(make_tiny):
    """Padding and forced tokens have no ratio; they must not show as 1."""
    tiny = make_tiny()
    (first, *_) = trained_on(tiny)
    (segment,) = first.rollout.segments
    newer = replace(segment, logprobs=tuple(logp + 1.0 for logp in segment.logprobs))
    forced = Segment(token_ids=segment.token_ids[:2], logprobs=(0.0, 0.0), author=Author.FORCED)
    rollout = replace(first.rollout, segments=(newer, forced))
    metrics = learner(tiny).step([Experience(rollout=rollout, advantage=-1.0)], step=0)
    assert metrics["policy/importance_ratio_max"] == pytest.approx(1 / math.e, rel=1e-3)


class Flaky:
    """Norms as given, half of the square in each role; weights untouched."""

    def __init__(self, *norms):
        self.norms = list(norms)

    def backward(self, loss, *, last):
        pass

    def update(self, lr):
        return dict.fromkeys(("vision", "language"), self.norms.pop(0) / math.sqrt(2))


def test_an_update_left_out_is_counted_in_whichever_epoch(make_tiny):
    tiny = make_tiny()
    metrics = learner(tiny, optimizer=Flaky(math.nan, math.inf, 1.0), epochs=3).step(trained_on(tiny), step=0)
    assert metrics["learner/nonfinite_updates"] == 2.0
    assert metrics["learner/grad_norm"] == pytest.approx(1.0)
    assert metrics["learner/grad_norm/vision"] == metrics["learner/grad_norm/language"] == pytest.approx(0.5**0.5)


def test_the_rate_is_the_schedules(make_tiny):
    tiny = make_tiny()
    plan = LearnerConfig(
        loss=LossConfig(),
        optimizer=OptimizerConfig(lr=1.0, warmup_steps=2, lr_schedule="linear"),
        total_steps=5,
        micro_batch_groups=1,
        micro_batch_tokens=10_000,
        epochs=1,
        shared_prefix=False,
        pad_id=tiny.eos_id,
    )
    teacher = PolicyLearner(tiny.policy, tiny.processor, Flaky(), plan)
    rates = [teacher.step([], step=step)["learner/lr"] for step in range(5)]
    assert rates == pytest.approx([0.5, 1.0, 2 / 3, 1 / 3, 0.0])


def test_imitation_raises_the_likelihood_of_the_demonstrations(make_tiny):
    tiny = make_tiny()
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:4]]
    lessons = [
        Experience(rollout=tiny.processor.build_demonstration(p, p.sample.target), advantage=0.0) for p in prompts
    ]
    teacher = learner(tiny, lr=0.01)
    losses = [teacher.step(lessons, step=step)["learner/loss"] for step in range(4)]
    assert losses[3] < losses[0] - 0.5


def shifted(experiences, by):
    """The same, off a sampler whose log-probs are lower by so many nats."""
    moved = []
    for each in experiences:
        (segment,) = each.rollout.segments
        other = replace(segment, logprobs=tuple(logp - by for logp in segment.logprobs))
        moved.append(replace(each, rollout=replace(each.rollout, segments=(other,))))
    return moved


def test_the_gap_is_measured_where_the_first_mini_batch_is_all_replay(make_tiny):
    """Its fresh group has no gradient: fresh tokens begin with the second mini-batch, which is then trained first."""
    tiny = make_tiny()
    first, second, third = group_by_prompt(trained_on(tiny))
    idle = [replace(each, advantage=0.0) for each in first]
    old = shifted([replace(each, staleness=2) for each in third], 0.5)
    metrics = learner(tiny, lr=0.02, mini_batches=2).step([*idle, *second, *old], step=0)
    assert metrics["rollout/logprob_diff_mean"] < LOGPROBS  # hence before any update
    assert metrics["policy/importance_ratio_max"] > 1.2


@pytest.mark.parametrize("options", [{"micro_batch": 1}, {"micro_batch": 3, "epochs": 2}, {"mini_batches": 3}])
def test_the_worst_token_is_known_by_its_sample_and_reported_at_once(make_tiny, options):
    tiny, warnings = make_tiny(), []
    experiences = trained_on(tiny)
    experiences[7:8] = shifted(experiences[7:8], 8.0)
    experiences = [replace(each, staleness=1) for each in experiences]
    metrics = learner(tiny, lr=1e-6, **options).step(experiences, step=0)
    health = HealthMonitor(HealthConfig(), warnings.append)
    nothing = SelectedExperiences(groups=(), advantages=(), experiences=(), has_signal=False)
    health.on_step_end(TrainingState(step=1), StepResult(selected=nothing, metrics=metrics, seconds={}))
    owner = f"rollout 1 of text sample {tiny.samples[2].id}"
    assert f"step 1: a token of {owner} is 2.98e+03 times as likely" in warnings[0]
    if "mini_batches" not in options:  # the first update alone tells of the engine
        assert f"step 1: rollout engine and learner differ by 8 nats on a token of {owner}" in warnings[1]


def test_the_learners_own_old_log_probs_are_those_of_the_steps_start(make_tiny):
    """The ratio begins at 1 whatever the sampler said, and moves with the second update; the gap is still reported."""
    tiny = make_tiny()
    off = shifted(trained_on(tiny), 0.5)
    start = log_probs(tiny.policy, tiny, off)
    metrics = learner(tiny, lr=0.02, old_logprobs="recomputed").step(off, step=0)
    assert metrics["policy/importance_ratio_max"] == pytest.approx(1.0)
    assert metrics["policy/clip_frac"] == 0.0
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(0.5, abs=1e-4)

    once, twice = make_tiny(), make_tiny()
    learner(once, lr=0.02, old_logprobs="recomputed").step(off, step=0)
    second = learner(twice, lr=0.02, old_logprobs="recomputed", epochs=2).step(off, step=0)
    moved = (log_probs(once.policy, once, off) - start).exp()
    assert second["policy/importance_ratio_max"] == pytest.approx(float(moved.max()), rel=1e-4)
    assert second["policy/importance_ratio_max"] > 1.01


@pytest.mark.parametrize(("kind", "by", "factor"), [("tis", 0.5, 1.5), ("tis", 0.1, math.exp(0.1)), ("mask", 0.5, 0.0)])
def test_importance_weights_scale_the_policy_term(make_tiny, kind, by, factor):
    tiny = make_tiny()
    plain = learner(tiny, optimizer=Still(tiny), old_logprobs="recomputed").step(trained_on(tiny), step=0)
    correction = RolloutCorrectionConfig(method=kind, low=0.5, high=1.5)
    metrics = learner(tiny, optimizer=Still(tiny), old_logprobs="recomputed", rollout_correction=correction).step(
        shifted(trained_on(tiny), by), step=0
    )
    assert metrics["policy/rollout_correction_weight_mean"] == pytest.approx(factor, rel=1e-3)
    assert metrics["learner/loss"] == pytest.approx(factor * plain["learner/loss"], rel=1e-3)
    assert metrics["learner/grad_norm"] == pytest.approx(factor * plain["learner/grad_norm"], rel=1e-3)


class Still:
    """The norm of the gradient; weights untouched."""

    def __init__(self, tiny):
        self.parameters = list(tiny.policy.trained.values())

    def backward(self, loss, *, last):
        loss.backward()

    def update(self, lr):
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, math.inf))
        for parameter in self.parameters:
            parameter.grad = None
        return {"language": norm}


@pytest.mark.parametrize(("by", "warned"), [(0.0, False), (0.1, True)])
def test_a_gap_to_the_engine_is_warned_of_however_few_groups_have_a_signal(make_tiny, by, warned):
    """One group of three is run: a mean over all three would hide a gap of 0.1 nats below the threshold of 0.05."""
    tiny, warnings = make_tiny(), []
    experiences = shifted(trained_on(tiny), by)
    experiences = experiences[:3] + [replace(each, advantage=0.0) for each in experiences[3:]]
    metrics = learner(tiny).step(experiences, step=0)
    nothing = SelectedExperiences(groups=(), advantages=(), experiences=(), has_signal=True)
    monitor = HealthMonitor(HealthConfig(window=1), warnings.append)
    monitor.on_step_end(TrainingState(step=1), StepResult(selected=nothing, metrics=metrics, seconds={}))
    assert ["rollout engine and learner differ by 0.1 nats" in text for text in warnings] == [True] * warned


@pytest.mark.parametrize("stale", [False, True], ids=["fresh", "replayed"])
def test_gspo_clips_nothing_before_the_policy_has_moved(make_tiny, stale):
    """Its bounds are below the rounding of a bfloat16 engine, so the preset compares with the learner alone."""
    tiny = make_tiny()
    engine = Policy(copy.deepcopy(tiny.policy.model).to(torch.bfloat16))
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:4]]
    groups = hf_sampler(engine, tiny.processor, seed_parts=("test",)).generate(prompts, 8, tiny.params, step=0)
    preset = ALGORITHM_PRESETS["gspo"]
    replayed = {"staleness": 1, "old_logprobs_source": preset.get("replay", {}).get("old_logprobs", "recorded")}
    experiences = []
    for group in groups:
        for index, rollout in enumerate(group):
            experience = Experience(rollout=rollout, advantage=(-1.0) ** index)
            experiences.append(replace(experience, **replayed) if stale else experience)
    metrics = learner(tiny, optimizer=Still(tiny), **preset["loss"]).step(experiences, step=0)
    assert metrics["policy/clip_frac"] == 0.0
    assert metrics["policy/importance_ratio_max"] == pytest.approx(1.0, abs=1e-5)
    recorded = {**preset["loss"], "old_logprobs": "recorded"}
    experiences = [replace(experience, old_logprobs_source=None) for experience in experiences]
    metrics = learner(tiny, optimizer=Still(tiny), **recorded).step(experiences, step=0)
    assert metrics["policy/clip_frac"] > 0.05


def some_with_signal(tiny):
    """Three groups of three sampled and stale responses of unequal length; the last group has no advantage."""
    varied = []
    for number, each in enumerate(trained_on(tiny, advantages=(1.0, -1.0, 0.5))):
        (segment,) = each.rollout.segments
        kept = 1 + number % 4
        shifts = [0.3 * math.cos(3 * number + place) for place in range(kept)]
        own = zip(segment.logprobs[:kept], shifts, strict=False)
        logprobs = tuple(logprob + shift for logprob, shift in own)
        shorter = replace(segment, token_ids=segment.token_ids[: len(logprobs)], logprobs=logprobs)
        advantage = 0.0 if number >= 6 else each.advantage
        rollout = replace(each.rollout, segments=(shorter,))
        varied.append(replace(each, rollout=rollout, advantage=advantage, staleness=number % 2))
    return varied


def slow_metrics(tiny, experiences, *, sequence, low=0.1, high=0.15, dual=1.2):
    """Means over the tokens of responses with an advantage, one response and one token at a time."""
    totals = dict.fromkeys(["entropy_nats", "approx_kl", "clip_frac_low", "clip_frac_high", "clip_frac_dual"], 0.0)
    tokens, fresh_gaps, good_logprobs = 0, [], []
    for each in experiences:
        if not each.advantage:
            continue
        batch = collate([[each]], tiny.processor, pad_id=tiny.eos_id, shared_prefix=False)
        with torch.no_grad():
            scores = tiny.policy.compute_logprobs(batch)
        (segment,) = each.rollout.segments
        gaps = [float(now) - old for now, old in zip(scores.logprobs_N, segment.logprobs, strict=True)]
        for gap, entropy in zip(gaps, scores.entropies_N.tolist(), strict=True):
            ratio = math.exp(sum(gaps) / len(gaps) if sequence else gap)
            totals["entropy_nats"] += entropy
            totals["approx_kl"] += math.exp(gap) - 1 - gap
            totals["clip_frac_low"] += ratio < 1 - low and each.advantage < 0
            totals["clip_frac_high"] += ratio > 1 + high and each.advantage > 0
            totals["clip_frac_dual"] += ratio > dual and each.advantage < 0
            tokens += 1
        fresh_gaps += [abs(gap) for gap in gaps] if not each.staleness else []
        good_logprobs += scores.logprobs_N.tolist() if each.advantage > 0 else []
    means = {f"policy/{name}": total / tokens for name, total in totals.items()}
    means["policy/clip_frac"] = means["policy/clip_frac_low"] + means["policy/clip_frac_high"]
    means["learner/sft_loss_nats"] = -sum(good_logprobs) / len(good_logprobs)
    return means, sum(fresh_gaps) / len(fresh_gaps)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_means_are_over_the_tokens_that_were_run(make_tiny, level, mini_batches):
    """Neither groups without signal nor unequal mini- and micro-batches change them."""
    tiny = make_tiny()
    experiences = some_with_signal(tiny)
    expected, gap = slow_metrics(tiny, experiences, sequence=level == "sequence")
    options = {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.2, "importance_ratio_level": level}
    options["sft_loss"] = {"coef": 0.1, "on": "response"}
    cuts = {"mini_batches": mini_batches, "micro_batch": 1}
    metrics = learner(tiny, optimizer=Still(tiny), **cuts, **options).step(experiences, step=0)
    assert {name: metrics.get(name) for name in expected} == pytest.approx(expected, rel=1e-3)
    assert min(expected.values()) > 0.0
    if mini_batches == 1:  # else it is that of the first update alone
        assert metrics["rollout/logprob_diff_mean"] == pytest.approx(gap, rel=1e-3)


def test_an_advantage_that_is_no_number_stops_the_step_by_name(make_tiny):
    tiny = make_tiny()
    before = weights(tiny)
    with pytest.raises(ValueError, match=rf"sample {tiny.samples[0].id}, rollout 1: advantage nan is not finite"):
        learner(tiny).step(trained_on(tiny, advantages=(1.0, math.nan)), step=0)
    assert same(before, weights(tiny))


def test_a_step_of_truncated_responses_alone_updates_nothing_where_they_are_masked(make_tiny):
    tiny = make_tiny()
    before = weights(tiny)
    cut = [replace(each, rollout=replace(each.rollout, finish_reason=FinishReason.LENGTH)) for each in trained_on(tiny)]
    assert learner(tiny, mask_truncated=True).step(cut, step=0)["learner/no_gradient_frac"] == 1.0
    assert same(before, weights(tiny))


def test_an_empty_completion_is_not_run(make_tiny):
    tiny = make_tiny()
    first, *others = trained_on(tiny)
    nothing = replace(first.rollout, segments=(replace(first.rollout.segments[0], token_ids=(), logprobs=()),))
    learned = learner(tiny, optimizer=Still(tiny)).step([replace(first, rollout=nothing), *others], step=0)
    alone = learner(tiny, optimizer=Still(tiny)).step(others, step=0)
    assert learned["learner/grad_norm"] == pytest.approx(alone["learner/grad_norm"], rel=1e-5)
    assert learned["learner/no_gradient_frac"] == pytest.approx(1 / 9)


def test_a_penalty_in_the_reward_moves_advantages_alone(make_tiny):
    """At advantage 0 its gradient is that of sum_t kl_remaining(t) log policy(t), here for responses of one token."""
    tiny = make_tiny()
    brief = []
    for each in trained_on(tiny, advantages=(0.0, 0.0)):
        (segment,) = each.rollout.segments
        one = replace(segment, token_ids=segment.token_ids[:1], logprobs=segment.logprobs[:1])
        brief.append(replace(each, rollout=replace(each.rollout, segments=(one,))))
    reference = tiny.policy.frozen_copy()
    with torch.no_grad():
        for parameter in reference.model.parameters():
            parameter.mul_(1.1)
    kl = log_probs(tiny.policy, tiny, brief) - log_probs(reference, tiny, brief)
    penalised = [replace(each, advantage=-0.5 * float(k)) for each, k in zip(brief, kl, strict=True)]
    in_reward = KlConfig(coef=0.5, estimator="k1", apply_to="reward")
    metrics = learner(tiny, optimizer=Still(tiny), reference=reference, kl=in_reward).step(brief, step=0)
    by_hand = learner(tiny, optimizer=Still(tiny)).step(penalised, step=0)
    assert metrics["learner/grad_norm"] == pytest.approx(by_hand["learner/grad_norm"], rel=1e-4)
    assert metrics["policy/reference_kl_nats"] == pytest.approx(float(kl.mean()), rel=1e-3)
