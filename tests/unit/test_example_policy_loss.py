"""examples/policy_loss.py in a real learner step: its gradient is that of the formula, however the step is cut."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmrl.config.schema import LossConfig, OptimizerConfig
from mmrl.learner.learner import LearnerConfig, PolicyLearner
from mmrl.learner.loss import load_policy_loss
from mmrl.policy.batch import collate, group_by_prompt
from mmrl.types import Experience, UserError

EXAMPLES = Path(__file__).parents[2] / "examples"
SIMPLE = {"fn": "./policy_loss.py:simple_policy_loss", "args": {"epsilon": 0.1}}


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
def experiences(tiny):
    """Three groups of three, off the policy, the second response of each without advantage."""
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:3]]
    made = []
    for group in tiny.sampler().generate(prompts, 3, tiny.params, step=0):
        for index, rollout in enumerate(group):
            (segment,) = rollout.segments
            older = replace(segment, logprobs=tuple(logprob - 0.2 * (index - 1) for logprob in segment.logprobs))
            made.append(Experience(rollout=replace(rollout, segments=(older,)), advantage=1.0 - index))
    return made


def gradient(tiny, experiences, *, base_dir=EXAMPLES, micro_batch_groups=8, shared_prefix=True, **loss):
    loss = LossConfig(**{"policy_loss": SIMPLE, **loss})
    config = LearnerConfig(
        loss=loss,
        optimizer=OptimizerConfig(),
        total_steps=4,
        micro_batch_groups=micro_batch_groups,
        micro_batch_tokens=10_000,
        epochs=1,
        shared_prefix=shared_prefix,
        pad_id=tiny.eos_id,
        policy_loss_fn=load_policy_loss(loss, base_dir),
    )
    tiny.policy.model.zero_grad()
    metrics = PolicyLearner(tiny.policy, tiny.processor, Accumulate(), config).step(experiences, step=0)
    return metrics, torch.cat([p.grad.flatten() for p in tiny.policy.model.parameters() if p.grad is not None])


def distance(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


def test_the_gradient_is_that_of_the_formula(tiny, experiences):
    metrics, ours = gradient(tiny, experiences)
    batch = collate(group_by_prompt(experiences), tiny.processor, pad_id=tiny.eos_id)
    tiny.policy.model.zero_grad()
    logprobs = tiny.policy.compute_logprobs(batch).logprobs_N
    recorded, advantages = [], []
    for experience in experiences:
        own = experience.rollout.segments[0].logprobs
        recorded += own
        advantages += [experience.advantage] * len(own)
    ratio, advantage = (logprobs - torch.tensor(recorded)).exp(), torch.tensor(advantages)
    loss = -(ratio * advantage - advantage.abs() / 0.2 * (ratio - 1) ** 2).mean()
    loss.backward()
    theirs = torch.cat([p.grad.flatten() for p in tiny.policy.model.parameters() if p.grad is not None])
    assert metrics["learner/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["learner/no_gradient_frac"] == 0.0  # a function may train on responses without advantage
    assert distance(ours, theirs) < 1e-5


@pytest.mark.parametrize("cut", [{"micro_batch_groups": 1}, {"shared_prefix": False, "micro_batch_groups": 2}])
def test_the_gradient_does_not_depend_on_how_the_step_is_cut(tiny, experiences, cut):
    whole_metrics, whole = gradient(tiny, experiences, aggregation="sequence", entropy={"coef": 0.1})
    metrics, parts = gradient(tiny, experiences, aggregation="sequence", entropy={"coef": 0.1}, **cut)
    assert distance(parts, whole) < 1e-5
    assert metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-6)


def test_it_is_called_once_a_response(tiny, experiences, tmp_path):
    """A function that takes means over its tokens must not see those of other responses."""
    (tmp_path / "mine.py").write_text(
        "SEEN = []\n"
        "def mine(logprobs, old_logprobs, advantages, mask):\n"
        "    SEEN.append((len(logprobs), bool(mask.all()), old_logprobs.requires_grad, advantages.unique().numel()))\n"
        "    return -logprobs * advantages\n"
    )
    policy_loss = {"fn": "./mine.py:mine"}
    gradient(tiny, experiences, base_dir=tmp_path, policy_loss=policy_loss)
    seen = load_policy_loss(LossConfig(policy_loss=policy_loss), tmp_path).func.__globals__["SEEN"]
    assert sorted(seen) == sorted((e.rollout.num_tokens, True, False, 1) for e in experiences)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("return (logprobs * advantages).mean()", r"returned a tensor \[\]; it must return the loss of each token"),
        ("return [0.0]", "returned list; it must return the loss of each token"),
        ("return -logprobs.detach() * advantages", "returned a tensor without gradient; compute it from `logprobs`"),
    ],
)
def test_a_wrong_return_value_names_the_function(tiny, experiences, tmp_path, body, complaint):
    (tmp_path / "mine.py").write_text(f"def mine(logprobs, old_logprobs, advantages, mask):\n    {body}\n")
    with pytest.raises(UserError, match=f"loss.policy_loss './mine.py:mine' {complaint}"):
        gradient(tiny, experiences, base_dir=tmp_path, policy_loss={"fn": "./mine.py:mine"})


def test_options_are_checked_before_the_first_step():
    with pytest.raises(UserError, match="has no option 'epsilom'; did you mean 'epsilon'"):
        load_policy_loss(LossConfig(policy_loss={**SIMPLE, "args": {"epsilom": 0.1}}), EXAMPLES)
    with pytest.raises(UserError, match="a policy loss is called with"):
        load_policy_loss(LossConfig(policy_loss={"fn": "./advantage.py:rank_advantage"}), EXAMPLES)


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ({"importance_ratio_level": "sequence"}, "`importance_ratio_level: sequence` would have no effect"),
        ({"dual_clip": 3.0}, "`dual_clip` would have no effect"),
        ({"log_ratio_clip": 7.0}, "`log_ratio_clip` would have no effect"),
    ],
)
def test_options_that_it_would_never_see_are_refused(option, complaint):
    with pytest.raises(ValueError, match=complaint):
        LossConfig(policy_loss=SIMPLE, **option)
