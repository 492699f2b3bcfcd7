"""The KL reference: frozen, a moving average or reset, and its state in a checkpoint."""

import pytest
import torch

from mmrl.config.schema import OptimizerConfig
from mmrl.config.schema import ReferenceConfig as Options
from mmrl.learner.optimizer_torch import TorchOptimizer
from mmrl.learner.reference import ReferencePolicy
from mmrl.policy.policy import PolicyModel
from mmrl.types import TrainingState


def add_to_weights(tiny, by):
    with torch.no_grad():
        for parameter in tiny.policy.trainable.values():
            parameter.add_(by)


def update(reference, step):
    """Update a reference whose optimizer must keep its moments; return True if the reference was reset."""
    metrics = reference.update(TrainingState(step=step), reset_optimizer=pytest.fail)
    return metrics.get("learner/reference_resets", 0.0) == 1.0


def first_weight(model):
    return next(model.parameters()).detach().flatten()[0].item()


def test_a_frozen_reference_stays(make_tiny):
    tiny = make_tiny()
    reference = ReferencePolicy(tiny.policy, Options())
    begun = first_weight(reference.policy.model)
    add_to_weights(tiny, 1.0)
    assert not update(reference, 0)
    assert first_weight(reference.policy.model) == begun
    assert reference.is_frozen and reference.state() == {}


def test_an_average_follows_its_recursion(make_tiny):
    tiny = make_tiny()
    reference = ReferencePolicy(tiny.policy, Options(update="ema", ema_decay=0.75, update_every=2))
    expected = first_weight(tiny.policy.model)
    for step in range(6):
        add_to_weights(tiny, 0.5)
        assert not update(reference, step)
        if step % 2:
            expected = 0.75 * expected + 0.25 * first_weight(tiny.policy.model)
        assert first_weight(reference.policy.model) == pytest.approx(expected, rel=1e-6)


def test_an_average_of_bfloat16_weights_keeps_small_changes(make_tiny):
    """In bfloat16 1 + 0.001 is 1: an average kept there would never move."""
    tiny = make_tiny()
    tiny.policy.model.to(torch.bfloat16)
    with torch.no_grad():
        for parameter in tiny.policy.trainable.values():
            parameter.fill_(1.0)
    reference = ReferencePolicy(tiny.policy, Options(update="ema", ema_decay=0.999))
    with torch.no_grad():
        for parameter in tiny.policy.trainable.values():
            parameter.fill_(2.0)
    for step in range(100):
        update(reference, step)
    assert first_weight(reference.policy.model) == pytest.approx(2 - 0.999**100, rel=1e-2)


def test_frozen_weights_are_shared_with_the_reference(make_tiny):
    policy = PolicyModel(make_tiny().policy.model, freeze=("vision", "projector"))
    reference = ReferencePolicy(policy, Options(update="ema"))
    language = [name for name, _ in policy.model.named_parameters() if "visual" not in name]
    assert len(reference.state()["reference"]) == len(language)
    assert all(reference.policy.frozen[name] is weight for name, weight in policy.frozen.items())  # shared, not copied


@pytest.mark.parametrize(("kind", "decay"), [("ema", {"ema_decay": 0.9}), ("reset", {})])
def test_a_restored_reference_makes_the_same_updates(make_tiny, kind, decay):
    tiny = make_tiny()
    options = Options(update=kind, update_every=2, **decay)
    reference = ReferencePolicy(tiny.policy, options)
    add_to_weights(tiny, 0.5)
    update(reference, 1)
    saved = {table: {place: kept.clone() for place, kept in of.items()} for table, of in reference.state().items()}
    add_to_weights(tiny, 0.5)
    again = ReferencePolicy(tiny.policy, options)
    again.load_state(saved)
    for step in (2, 3):
        assert update(reference, step) == update(again, step) == (kind == "reset" and step == 3)
        pairs = zip(reference.policy.model.parameters(), again.policy.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("reset_optimizer", [False, True])
def test_a_reset_copies_the_policy_and_may_clear_the_moments(make_tiny, reset_optimizer):
    tiny = make_tiny()
    options = Options(update="reset", update_every=3, reset_optimizer=reset_optimizer)
    reference = ReferencePolicy(tiny.policy, options)
    optimizer = TorchOptimizer(tiny.policy.trained_by_component, OptimizerConfig(lr=1e-3))
    for parameter in tiny.policy.trainable.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.update(1e-3)
    states = [TrainingState(step=step) for step in range(3)]
    resets = [reference.update(state, reset_optimizer=optimizer.reset) for state in states]
    assert [metrics["learner/reference_resets"] for metrics in resets] == [0.0, 0.0, 1.0]
    assert first_weight(reference.policy.model) == first_weight(tiny.policy.model)
    assert (optimizer.state()["moments"] == {}) == reset_optimizer
    for parameter in tiny.policy.trainable.values():
        parameter.grad = torch.ones_like(parameter)
    assert all(norm > 0.0 for norm in optimizer.update(1e-3).values())  # the cleared optimizer continues


def test_a_plateau_of_rewards_resets_the_reference_and_starts_anew(make_tiny):
    tiny = make_tiny()
    reference = ReferencePolicy(tiny.policy, Options(update="reset", plateau={"window": 2, "min_improvement": 0.1}))
    earned, resets, state = [0.1, 0.2, 0.5, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6], [], TrainingState()
    for state.step, reward in enumerate(earned):
        state.reset_rewards.append(reward)
        metrics = reference.update(state, reset_optimizer=pytest.fail)
        resets.append(metrics["learner/reference_resets"])
    # By hand: 0.2 to 0.5, 0.15 to 0.55 and 0.35 to 0.6 rise by 0.1 or more; 0.55 to 0.6 rises by 0.05 at step 5. From
    # then on there are four rewards again after step 9, which does not come.
    assert resets == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert state.reset_rewards == [0.6, 0.6, 0.6]
