"""A step of the learner: old log-probs and the reference in each update, repeated passes, metrics, idle steps."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from learning import (
    KeepGradients,
    MeasureGradients,
    Sgd,
    copy_of_sample,
    cut_response,
    make_experiences,
    make_learner,
    perturbed_copy,
    shift_logprobs,
)
from rounding import LOGPROBS

from mmrl.algo.losses import estimate_kl
from mmrl.config.schema import HealthConfig, KlConfig, LoraConfig, OptimizerConfig, RolloutCorrectionConfig
from mmrl.learner.optimizer_torch import TorchOptimizer
from mmrl.policy.batch import collate, group_by_prompt
from mmrl.policy.families import FAMILIES
from mmrl.policy.lora import create_adapter
from mmrl.policy.policy import PolicyModel
from mmrl.training.callbacks import TrainStepResult
from mmrl.training.health import HealthMonitor
from mmrl.types import FinishReason, SelectedExperiences, TrainingState

RATIO_MIN, RATIO_MAX = "policy/importance_ratio_min", "policy/importance_ratio_max"


@pytest.fixture
def tiny(make_tiny):
    """A tiny policy for each test, which may train it."""
    return make_tiny()


class GivenNorms(KeepGradients):
    """An optimizer whose updates return these norms, one after another, half of the square in each component."""

    def __init__(self, *norms):
        self.norms = list(norms)

    def update(self, lr):
        return dict.fromkeys(("vision", "language"), self.norms.pop(0) / math.sqrt(2))


def copy_weights(tiny):
    return {name: value.clone() for name, value in tiny.policy.model.state_dict().items()}


def is_unchanged(tiny, before):
    return all(torch.equal(before[name], value) for name, value in tiny.policy.model.state_dict().items())


def compute_logprobs(policy, tiny, experiences):
    """Log-probs of all tokens of the responses, group after group, one vector."""
    batch = collate(group_by_prompt(experiences), tiny.processor, pad_id=tiny.eos_id, shared_prefix=False)
    with torch.no_grad():
        return policy.compute_logprobs(batch).logprobs_N


def shift_all(experiences, by):
    return [shift_logprobs(experience, by) for experience in experiences]


def warnings_of(metrics):
    """The warnings that the metrics of one step cause."""
    warnings = []
    nothing = SelectedExperiences(groups=(), experiences_by_group=(), experiences=(), has_signal=True)
    result = TrainStepResult(selected=nothing, metrics=metrics, seconds={})
    HealthMonitor(HealthConfig(), warnings.append).on_step_end(TrainingState(step=1), result)
    return warnings


# The reference


def test_the_penalty_is_the_mean_of_its_estimate_and_never_changes_the_reference(tiny):
    experiences, reference = make_experiences(tiny, (0.0, 0.0)), perturbed_copy(tiny.policy, 1.1)
    logprobs, ref_logprobs = (compute_logprobs(policy, tiny, experiences) for policy in (tiny.policy, reference))
    expected = float(estimate_kl(logprobs, ref_logprobs, "k3").mean())
    before = copy.deepcopy(reference.model.state_dict())
    metrics = make_learner(tiny, reference=reference, kl=KlConfig(coef=0.5)).step(experiences, step=0)
    assert expected > 1e-3
    assert metrics["policy/reference_kl_nats"] == pytest.approx(expected, rel=1e-4)
    assert metrics["learner/loss"] == pytest.approx(0.5 * expected, rel=1e-4)  # advantages are 0
    assert metrics["learner/no_gradient_frac"] == 0.0
    assert all(torch.equal(before[name], value) for name, value in reference.model.state_dict().items())


def test_a_penalty_in_the_reward_is_that_of_the_steps_start_in_every_mini_batch(tiny):
    experiences, reference = make_experiences(tiny, (0.0, 0.0)), perturbed_copy(tiny.policy)
    in_reward = KlConfig(coef=1.0, estimator="k1", apply_to="reward")
    start = compute_logprobs(tiny.policy, tiny, experiences) - compute_logprobs(reference, tiny, experiences)
    counts = [sum(e.rollout.num_tokens for e in group) for group in group_by_prompt(experiences)]
    expected = sum(float(part.mean()) for part in start.split(counts)) / 3
    learner = make_learner(tiny, lr=0.05, optimizer=Sgd(tiny), reference=reference, kl=in_reward, num_mini_batches=3)
    # A mean of 4e-4 nats of both signs, so rounding moves it by 2e-4 of itself; the update moves it by 1e-2 or more.
    assert learner.step(experiences, step=0)["policy/reference_kl_nats"] == pytest.approx(expected, rel=1e-3)
    after = compute_logprobs(tiny.policy, tiny, experiences) - compute_logprobs(reference, tiny, experiences)
    assert abs(float(after.mean()) - expected) > 1e-2 * abs(expected)


# Updates and their rates


def test_an_on_policy_step_clips_nothing_and_has_a_gradient_in_every_component(tiny):
    metrics = make_learner(tiny).step(make_experiences(tiny), step=0)
    assert metrics["policy/clip_frac"] == 0.0
    assert metrics[RATIO_MAX] == pytest.approx(1.0, abs=1e-4)
    assert metrics["rollout/logprob_diff_mean"] < LOGPROBS
    assert 0.0 < metrics["policy/entropy_nats"] <= math.log(330)
    norms = [metrics[f"learner/grad_norm/{component}"] for component in ("vision", "projector", "language")]
    assert min(norms) > 0.0
    assert metrics["learner/grad_norm"] == pytest.approx(math.hypot(*norms))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_component_learns_at_a_rate_of_its_own(make_tiny, family):
    tiny = make_tiny(family)
    rates = {"vision": 1e-5, "projector": 1e-4, "language": 1e-3}
    options = OptimizerConfig(lr=1e-3, lr_by_component={"vision": 1e-5, "projector": 1e-4})
    before = copy_weights(tiny)
    metrics = make_learner(tiny, optimizer_config=options).step(make_experiences(tiny), step=0)
    for component, rate in rates.items():
        names = [name for name in tiny.policy.trainable if tiny.policy.family.component_of(name) == component]
        moved = max(float((tiny.policy.trainable[name].detach() - before[name]).abs().max()) for name in names)
        assert metrics[f"learner/grad_norm/{component}"] > 0
        assert moved == pytest.approx(rate, rel=0.01)  # Adam's first update is one of the rate


def test_the_rates_of_components_are_logged_where_they_differ(tiny):
    options = OptimizerConfig(lr=1e-3, lr_by_component={"vision": 1e-5, "projector": 1e-3}, warmup_steps=2)
    metrics = make_learner(tiny, optimizer_config=options).step([], step=0)
    rates = {name: value for name, value in metrics.items() if name.startswith("learner/lr")}
    assert rates == pytest.approx({"learner/lr": 5e-4, "learner/lr/vision": 5e-6})


def test_the_rate_follows_the_schedule(tiny):
    options = OptimizerConfig(lr=1.0, warmup_steps=2, lr_schedule="linear")
    learner = make_learner(tiny, optimizer_config=options, total_steps=5)
    rates = [learner.step([], step=step)["learner/lr"] for step in range(5)]
    assert rates == pytest.approx([0.5, 1.0, 2 / 3, 1 / 3, 0.0])


@pytest.mark.parametrize("case", ["no advantage", "no experience", "only truncated responses, which are masked"])
def test_a_step_without_a_gradient_changes_nothing(tiny, case):
    optimizer = TorchOptimizer(tiny.policy.trained_by_component, OptimizerConfig(weight_decay=0.1))
    experiences = make_experiences(tiny, (0.0, 0.0) if case == "no advantage" else (1.0, -1.0))
    cut = [replace(e, rollout=replace(e.rollout, finish_reason=FinishReason.LENGTH)) for e in experiences]
    given = {"no advantage": experiences, "no experience": []}.get(case, cut)
    before = copy_weights(tiny)
    metrics = make_learner(tiny, optimizer=optimizer, mask_truncated=True).step(given, step=3)
    assert metrics == {"learner/lr": 1e-3, "learner/no_gradient_frac": float(bool(given))}
    assert is_unchanged(tiny, before)
    assert optimizer.state()["moments"] == {}


def test_learner_says_for_which_rollouts_it_runs_a_forward_pass(tiny):
    without, whole = make_experiences(tiny, (0.0, 1.0))[:2]
    whole = replace(whole, rollout=replace(whole.rollout, finish_reason=FinishReason.EOS))
    cut = replace(whole, rollout=replace(whole.rollout, finish_reason=FinishReason.LENGTH))
    experiences = [without, whole, cut]
    options = {"none": {}, "entropy": {"entropy": {"coef": 0.1}}, "masked": {"mask_truncated": True}}
    runs = {}
    for name, loss in options.items():
        learner = make_learner(tiny, **loss)
        runs[name] = list(map(learner.has_gradient, experiences))
        metrics = learner.step(experiences, step=0)
        assert metrics["learner/no_gradient_frac"] == pytest.approx(runs[name].count(False) / 3)
    assert runs == {"none": [False, True, True], "entropy": [True] * 3, "masked": [False, True, False]}


def test_an_empty_response_is_not_run(tiny):
    first, *others = make_experiences(tiny)
    learner = make_learner(tiny, optimizer=MeasureGradients(tiny))
    metrics, alone = (learner.step(given, step=0) for given in ([cut_response(first, 0), *others], others))
    assert metrics["learner/grad_norm"] == pytest.approx(alone["learner/grad_norm"], rel=1e-5)
    assert metrics["learner/no_gradient_frac"] == pytest.approx(1 / 9)


def test_each_mini_batch_has_an_update_of_its_own(make_tiny):
    """Three groups in two mini-batches: as two learners with one optimizer, the second of which gets one group."""
    split, slow = make_tiny(), make_tiny()
    first, second, third = group_by_prompt(make_experiences(slow))
    options = {"lr": 0.02, "entropy": {"coef": 0.01}}
    optimizer = TorchOptimizer(slow.policy.trained_by_component, OptimizerConfig(lr=0.02))
    parts = ([*first, *third], second)
    expected = [make_learner(slow, optimizer=optimizer, **options).step(part, step=0) for part in parts]
    metrics = make_learner(split, num_mini_batches=2, **options).step(make_experiences(split), step=0)
    assert is_unchanged(split, copy_weights(slow))
    assert metrics["learner/loss"] == pytest.approx(sum(part["learner/loss"] for part in expected) / 2)
    assert metrics[RATIO_MAX] == max(part[RATIO_MAX] for part in expected) > 1.01
    assert metrics["rollout/logprob_diff_mean"] == expected[0]["rollout/logprob_diff_mean"] < LOGPROBS


def test_copies_of_a_sample_fill_all_mini_batches(tiny):
    experiences = make_experiences(tiny, (1.0, -1.0), num_prompts=1)
    copies = [copy for number in range(8) for copy in copy_of_sample(experiences, number)]
    optimizer = GivenNorms(*[1.0] * 8)
    make_learner(tiny, optimizer=optimizer, num_mini_batches=8).step(copies, step=0)
    assert optimizer.norms == []  # of 8 updates


def test_micro_batches_are_counted_over_epochs_and_mini_batches(tiny):
    learner = make_learner(tiny, ppo_epochs=2, num_mini_batches=2, micro_batch_groups=1)
    learner.step(make_experiences(tiny), step=0)
    assert learner._activity.counts == {"learn": (6, 6)}  # three groups, twice


@pytest.mark.parametrize(
    ("norms", "passes", "num_idle", "nonfinite"),
    [
        ((math.nan, math.inf, 1.0), {"ppo_epochs": 3}, 0, 2.0),
        ((math.nan, 1.0), {"num_mini_batches": 3}, 3, 1.0),  # no update for a mini-batch without a gradient
    ],
)
def test_nonfinite_updates_are_counted_over_the_step(tiny, norms, passes, num_idle, nonfinite):
    experiences = make_experiences(tiny)
    experiences[:num_idle] = [replace(experience, advantage=0.0) for experience in experiences[:num_idle]]
    metrics = make_learner(tiny, optimizer=GivenNorms(*norms), **passes).step(experiences, step=0)
    assert metrics["learner/nonfinite_updates"] == nonfinite
    assert metrics["learner/no_gradient_frac"] == pytest.approx(num_idle / 9)
    if not num_idle:  # norms are those of the last epoch
        assert metrics["learner/grad_norm"] == pytest.approx(1.0)
        assert metrics["learner/grad_norm/vision"] == metrics["learner/grad_norm/language"] == pytest.approx(0.5**0.5)


# Old log-probs


def train_slowly(tiny, experiences, *, lr, epochs=1, max_weight=None):
    """PPO as papers have it: old log-probs of the whole step first, then an update for each group.

    `max_weight` is that of TIS. Returns the ratios of each update, and its loss.
    """
    optimizer, groups = Sgd(tiny), group_by_prompt(experiences)
    olds, samplers = [], []
    for group in groups:
        recorded = torch.tensor([logprob for e in group for logprob in e.rollout.segments[0].logprobs])
        takes_recorded = [e.old_logprobs_source == "recorded" for e in group for _ in range(e.rollout.num_tokens)]
        olds.append(torch.where(torch.tensor(takes_recorded), recorded, compute_logprobs(tiny.policy, tiny, group)))
        samplers.append(recorded)
    ratios, losses = [], []
    for _ in range(epochs):
        for group, old, sampler in zip(groups, olds, samplers, strict=True):
            batch = collate([group], tiny.processor, pad_id=tiny.eos_id, shared_prefix=False)
            ratio = (tiny.policy.compute_logprobs(batch).logprobs_N - old).exp()
            advantage = torch.tensor([e.advantage for e in group for _ in range(e.rollout.num_tokens)])
            weight = (old - sampler).exp().clamp(max=max_weight) if max_weight else torch.ones_like(old)
            loss = -(weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)).mean()
            optimizer.backward(loss, last=True)
            optimizer.update(lr)
            ratios.append(ratio.detach())
            losses.append(float(loss.detach()))
    return ratios, losses


MINI_BATCHES = {
    "in rows": {"shared_prefix": False},
    "packed": {},
    "two epochs": {"ppo_epochs": 2},
    "truncated weights": {"rollout_correction": RolloutCorrectionConfig(method="tis", high=1.5)},
}


@pytest.mark.parametrize("options", MINI_BATCHES.values(), ids=MINI_BATCHES)
@pytest.mark.parametrize("adapter", [None, LoraConfig(rank=4, targets=("language.attention", "vision.mlp"))])
def test_old_log_probs_of_every_mini_batch_are_those_before_the_first_update(make_tiny, options, adapter):
    ours, slow = make_tiny(), make_tiny()
    if adapter is not None:
        for tiny in (ours, slow):
            create_adapter(tiny.policy.model, adapter, 0, tiny.policy.family)
        ours, slow = (replace(tiny, policy=PolicyModel(tiny.policy.model)) for tiny in (ours, slow))
    experiences = shift_all(make_experiences(slow), -0.5)
    lr, max_weight = 0.3 if adapter else 0.05, 1.5 if "rollout_correction" in options else None
    ratios, losses = train_slowly(slow, experiences, lr=lr, epochs=options.get("ppo_epochs", 1), max_weight=max_weight)
    assert ratios[0].min() == pytest.approx(1.0, abs=1e-5) == ratios[0].max()
    assert all((ratio - 1.0).abs().max() > 0.01 for ratio in ratios[1:])

    before = compute_logprobs(ours.policy, ours, experiences)
    learner = make_learner(ours, lr=lr, optimizer=Sgd(ours), num_mini_batches=3, old_logprobs="recomputed", **options)
    metrics = learner.step(experiences, step=0)
    last = torch.cat(ratios[-3:])
    assert metrics[RATIO_MAX] == pytest.approx(float(last.max()), rel=1e-4)
    assert metrics[RATIO_MIN] == pytest.approx(float(last.min()), rel=1e-4)
    assert metrics["learner/loss"] == pytest.approx(sum(losses[-3:]) / 3, rel=1e-3, abs=1e-6)
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(0.5, abs=1e-4)  # of the first update
    moved, expected = (compute_logprobs(tiny.policy, tiny, experiences) - before for tiny in (ours, slow))
    assert (moved - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize(("replayed_source", "num_extra"), [("recorded", 0), ("recomputed", 2)])
def test_only_mini_batches_after_the_first_are_scored_in_advance_and_only_if_needed(
    make_tiny, monkeypatch, replayed_source, num_extra
):
    """Replayed rollouts may use recomputed log-probs where those of the current step do not."""
    ours, slow = make_tiny(), make_tiny()
    experiences = shift_all(make_experiences(slow), -0.1)
    experiences = [replace(e, old_logprobs_source="recorded") for e in experiences[:6]] + [
        replace(e, staleness=2, old_logprobs_source=replayed_source) for e in experiences[6:]
    ]
    ratios = torch.cat(train_slowly(slow, experiences, lr=0.05)[0])
    passes, compute = [], PolicyModel.compute_logprobs

    def compute_and_count(policy, *args):
        passes.append(torch.is_grad_enabled())
        return compute(policy, *args)

    monkeypatch.setattr(PolicyModel, "compute_logprobs", compute_and_count)
    metrics = make_learner(ours, lr=0.05, optimizer=Sgd(ours), num_mini_batches=3).step(experiences, step=0)
    assert metrics[RATIO_MAX] == pytest.approx(float(ratios.max()), rel=1e-4)
    assert metrics[RATIO_MIN] == pytest.approx(float(ratios.min()), rel=1e-4)
    assert passes.count(False) == num_extra
    assert passes.count(True) == 3 + 2  # two check the shared prefix in the learner's first step


# Values of single tokens


@pytest.mark.parametrize("options", [{}, {"ppo_epochs": 2}, {"shared_prefix": False, "micro_batch_groups": 1}])
def test_token_values_are_those_of_the_last_epoch_for_each_rollout(make_tiny, options):
    ours, slow = make_tiny(), make_tiny()
    experiences = make_experiences(slow)
    idle = replace(experiences[4], advantage=0.0)
    experiences[4] = idle  # has no gradient, hence no forward pass
    ratios, _ = train_slowly(slow, experiences, lr=0.05, epochs=options.get("ppo_epochs", 1))
    learner = make_learner(ours, lr=0.05, optimizer=Sgd(ours), num_mini_batches=3, old_logprobs="recomputed", **options)
    learner.step(experiences, step=0)
    values = learner.token_values(range(len(experiences)))
    assert values.keys() == {0, 1, 2, 3, 5, 6, 7, 8}
    last, start = torch.cat(ratios[-3:]).tolist(), 0
    for index, experience in enumerate(experiences):
        count = experience.rollout.num_tokens
        expected, start = last[start : start + count], start + count
        if experience is idle:
            continue
        assert values[index].ratios == pytest.approx(expected, rel=1e-4)
        assert values[index].advantages == (experience.advantage,) * count
        is_low = [experience.advantage < 0.0 and ratio < 0.8 for ratio in expected]
        is_high = [experience.advantage > 0.0 and ratio > 1.2 for ratio in expected]
        assert list(values[index].clipped) == [low + 2.0 * high for low, high in zip(is_low, is_high, strict=True)]
        assert all(entropy >= 0.0 for entropy in values[index].entropies)
    assert learner.token_values([5]).keys() == {5}
    learner.step([], step=1)
    assert learner.token_values(range(9)) == {}


def test_token_values_without_an_update_are_the_policys_logprobs(tiny):
    experiences = make_experiences(tiny)
    expected = compute_logprobs(tiny.policy, tiny, experiences).tolist()
    learner = make_learner(tiny, optimizer=KeepGradients())
    learner.step(experiences, step=0)
    values = learner.token_values(range(len(experiences)))
    found = [logprob for index in range(len(experiences)) for logprob in values[index].logprobs]
    assert found == pytest.approx(expected, abs=LOGPROBS)


# What the metrics of a step are taken over


def test_the_first_update_trains_on_on_policy_tokens_so_that_it_can_be_compared_with_the_engine(tiny):
    """The first mini-batch has no on-policy token with a gradient: its group is idle, and the rest is replayed."""
    first, second, third = group_by_prompt(make_experiences(tiny))
    idle = [replace(experience, advantage=0.0) for experience in first]
    replayed = shift_all([replace(experience, staleness=2) for experience in third], -0.5)
    metrics = make_learner(tiny, lr=0.02, num_mini_batches=2).step([*idle, *second, *replayed], step=0)
    assert metrics["rollout/logprob_diff_mean"] < LOGPROBS  # hence before any update
    assert metrics[RATIO_MAX] > 1.2


@pytest.mark.parametrize(
    "options", [{"micro_batch_groups": 1}, {"micro_batch_groups": 3, "ppo_epochs": 2}, {"num_mini_batches": 3}]
)
def test_the_worst_token_is_reported_at_once_with_its_sample(tiny, options):
    experiences = make_experiences(tiny)
    experiences[7] = shift_logprobs(experiences[7], -8.0)
    experiences = [replace(experience, staleness=1) for experience in experiences]
    warnings = warnings_of(make_learner(tiny, lr=1e-6, **options).step(experiences, step=0))
    owner = f"rollout 1 of text sample {tiny.samples[2].id}"
    assert f"step 1: a token of {owner} is 2.98e+03 times as likely" in warnings[0]
    if "num_mini_batches" not in options:  # only the first update is compared with the engine
        assert f"step 1: rollout engine and learner differ by 8 nats on a token of {owner}" in warnings[1]
