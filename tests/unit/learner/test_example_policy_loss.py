"""examples/policy_loss.py in a real learner step: its gradient is that of the formula, however the step is cut."""

from pathlib import Path

import pytest
import torch
from learning import gradients_of, make_experiences, relative_difference, shift_logprobs, step_gradient

from mmrl.config.schema import LossConfig
from mmrl.policy.batch import collate, group_by_prompt
from mmrl.training.functions import load_policy_loss
from mmrl.types import UserError

EXAMPLES = Path(__file__).parents[3] / "examples"
SIMPLE = {"fn": "./policy_loss.py:simple_policy_loss", "args": {"epsilon": 0.1}}


@pytest.fixture(scope="module")
def experiences(tiny):
    """Three groups of three, off the policy, the second response of each without advantage."""
    return [shift_logprobs(each, -0.2 * (each.rollout.index - 1)) for each in make_experiences(tiny, (1.0, 0.0, -1.0))]


def gradient(tiny, experiences, *, base_dir=EXAMPLES, policy_loss=SIMPLE, **options):
    policy_loss_fn = load_policy_loss(LossConfig(policy_loss=policy_loss), base_dir)
    return step_gradient(tiny, experiences, policy_loss=policy_loss, policy_loss_fn=policy_loss_fn, **options)


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
    assert metrics["learner/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["learner/no_gradient_frac"] == 0.0  # a function may train on responses without advantage
    assert relative_difference(ours, gradients_of(tiny.policy)) < 1e-5


@pytest.mark.parametrize("cut", [{"micro_batch_groups": 1}, {"shared_prefix": False, "micro_batch_groups": 2}])
def test_the_gradient_does_not_depend_on_how_the_step_is_cut(tiny, experiences, cut):
    whole_metrics, whole = gradient(tiny, experiences, aggregation="sequence", entropy={"coef": 0.1})
    metrics, parts = gradient(tiny, experiences, aggregation="sequence", entropy={"coef": 0.1}, **cut)
    assert relative_difference(parts, whole) < 1e-5
    assert metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-6)


def test_a_policy_loss_is_called_once_for_each_response(tiny, experiences, tmp_path):
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
        ("return (logprobs * advantages).mean()", r"returned a tensor \[\]"),
        ("return [0.0]", "returned list"),
        ("return -logprobs.detach() * advantages", "returned a tensor without gradient"),
    ],
)
def test_a_wrong_return_value_names_the_function(tiny, experiences, tmp_path, body, complaint):
    (tmp_path / "mine.py").write_text(f"def mine(logprobs, old_logprobs, advantages, mask):\n    {body}\n")
    with pytest.raises(UserError, match=f"loss.policy_loss './mine.py:mine' {complaint}"):
        gradient(tiny, experiences, base_dir=tmp_path, policy_loss={"fn": "./mine.py:mine"})


@pytest.mark.parametrize("option", [{"importance_ratio_level": "sequence"}, {"dual_clip": 3}, {"log_ratio_clip": 7}])
def test_options_that_the_function_would_never_see_are_refused(option):
    with pytest.raises(ValueError, match=f"`{next(iter(option))}.*no effect"):
        LossConfig(policy_loss=SIMPLE, **option)
