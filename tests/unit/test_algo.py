"""The formulas, against hand-computed values, independent slow versions and analytic gradients."""

import math
import random
import statistics
import subprocess
import sys

import pytest
import torch

from mmrl.algo.advantage import advantages, informative
from mmrl.algo.kl import k3
from mmrl.algo.loss import clipped_surrogate
from mmrl.algo.schedule import learning_rate
from mmrl.algo.seeds import derive

GRPO = {"baseline": "group_mean", "scale": "group_std", "eps": 1e-4}


def test_advantages_by_hand():
    # mean 0.5; sample variance (4 * 0.25) / 3
    width = math.sqrt(1 / 3) + 1e-4
    assert advantages([1, 0, 0, 1], **GRPO) == pytest.approx([0.5 / width, -0.5 / width, -0.5 / width, 0.5 / width])
    assert advantages([1, 0, 0, 1], baseline="group_mean", scale="none", eps=1e-4) == (0.5, -0.5, -0.5, 0.5)
    assert advantages([3, 1], baseline="none", scale="none", eps=1e-4) == (3, 1)
    assert advantages([3, 1], baseline="none", scale="group_std", eps=1e-4) == pytest.approx(
        [3 / (math.sqrt(2) + 1e-4), 1 / (math.sqrt(2) + 1e-4)]
    )


def test_advantages_equal_the_textbook():
    rng = random.Random(0)
    for _ in range(200):
        totals = [rng.uniform(-2, 2) for _ in range(rng.randint(2, 16))]
        mean, std = statistics.mean(totals), statistics.stdev(totals)
        expected = [(total - mean) / (std + 1e-4) for total in totals]
        assert advantages(totals, **GRPO) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert advantages(totals, **GRPO) == pytest.approx(
            ((torch.tensor(totals) - mean) / (torch.tensor(totals).std() + 1e-4)).tolist(), abs=1e-4
        )


def test_advantages_do_not_depend_on_the_order_of_siblings():
    totals = [0.1, 0.7, 0.2, 0.3, 0.9]
    forward = dict(zip(totals, advantages(totals, **GRPO), strict=True))
    backward = dict(zip(totals[::-1], advantages(totals[::-1], **GRPO), strict=True))
    assert forward == backward


@pytest.mark.parametrize("totals", [[0.1] * 3, [0.0] * 8, [0.1 + 0.2, 0.3], [1.0], [1e6] * 7])
@pytest.mark.parametrize("scale", ["group_std", "none"])
def test_a_group_without_differences_teaches_exactly_nothing(totals, scale):
    assert not informative(totals)
    assert advantages(totals, baseline="group_mean", scale=scale, eps=1e-4) == (0.0,) * len(totals)


def test_no_baseline_and_no_scale_keep_equal_rewards():
    assert advantages([1.0, 1.0], baseline="none", scale="none", eps=1e-4) == (1.0, 1.0)
    assert advantages([1.0, 1.0], baseline="none", scale="group_std", eps=1e-4) == (0.0, 0.0)


@pytest.mark.parametrize("totals", [[], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_advantages_refuse_what_is_no_group(totals):
    with pytest.raises(ValueError, match="finite totals"):
        advantages(totals, **GRPO)


def test_a_single_outlier_is_informative():
    assert informative([0, 0, 0, 1e-6])
    assert not informative([0.5])


def test_the_surrogate_by_hand():
    logp = torch.tensor([0.0, math.log(1.5), math.log(0.5), math.log(1.5), math.log(0.5)])
    advantage = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0])
    loss = clipped_surrogate(logp, torch.zeros(5), advantage, 0.2, 0.3)
    # -min: unclipped at ratio 1; 1.3 * 2; 0.5 * 2; -1.5 * 2; -0.8 * 2
    torch.testing.assert_close(loss, torch.tensor([-2.0, -2.6, -1.0, 3.0, 1.6]))


def test_the_surrogate_equals_a_slow_version():
    rng = random.Random(0)
    for _ in range(300):
        new, old, advantage = rng.uniform(-3, 0), rng.uniform(-3, 0), rng.uniform(-2, 2)
        low, high = rng.uniform(0.05, 0.5), rng.uniform(0.05, 0.5)
        ratio = math.exp(new) / math.exp(old)
        slow = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        fast = clipped_surrogate(*(torch.tensor(x, dtype=torch.float64) for x in (new, old, advantage)), low, high)
        assert fast.item() == pytest.approx(slow, rel=1e-12, abs=1e-14)


def test_at_ratio_one_the_gradient_is_the_policy_gradient():
    # d/dz of -A log softmax(z)[a] is -A (onehot(a) - softmax(z)): REINFORCE, computed here without autograd.
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(6, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    chosen_T = torch.tensor([0, 4, 2, 2, 1, 3])
    advantage_T = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, -0.1], dtype=torch.float64)
    logp_T = logits_TV.log_softmax(-1).gather(-1, chosen_T[:, None])[:, 0]
    clipped_surrogate(logp_T, logp_T.detach(), advantage_T, 0.2, 0.2).sum().backward()
    onehot_TV = torch.nn.functional.one_hot(chosen_T, 5)
    analytic_TV = -advantage_T[:, None] * (onehot_TV - logits_TV.detach().softmax(-1))
    torch.testing.assert_close(logits_TV.grad, analytic_TV)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.5, 1.0, 0.0),  # above the range and good: clipped
        (0.5, -1.0, 0.0),  # below the range and bad: clipped
        (0.5, 1.0, -0.5),  # below the range but good: pulled back, d(-rA)/dlogp = -rA
        (1.5, -1.0, 1.5),  # above the range but bad: pushed back
        (1.1, 1.0, -1.1),
        (0.9, -1.0, 0.9),
        (1.1, 0.0, 0.0),
    ],
)
def test_where_clipping_stops_the_gradient(ratio, advantage, slope):
    logp = torch.tensor(math.log(ratio), dtype=torch.float64, requires_grad=True)
    old = torch.zeros((), dtype=torch.float64, requires_grad=True)
    clipped_surrogate(logp, old, torch.tensor(advantage, dtype=torch.float64), 0.2, 0.2).backward()
    assert logp.grad.item() == pytest.approx(slope, abs=1e-12)
    assert old.grad is None


def test_an_advantage_broadcasts_over_its_rollout():
    logp_BT, old_BT = torch.zeros(2, 3), torch.zeros(2, 3)
    loss_BT = clipped_surrogate(logp_BT, old_BT, torch.tensor([[1.0], [-2.0]]), 0.2, 0.2)
    torch.testing.assert_close(loss_BT, torch.tensor([[-1.0] * 3, [2.0] * 3]))


def test_k3_by_hand():
    logp = torch.log(torch.tensor([0.5, 0.25], dtype=torch.float64))
    ref = torch.log(torch.tensor([0.5, 0.5], dtype=torch.float64))
    torch.testing.assert_close(k3(logp, ref), torch.tensor([0.0, 2 - math.log(2) - 1], dtype=torch.float64))


def test_the_mean_of_k3_under_the_policy_is_the_kl():
    generator = torch.Generator().manual_seed(1)
    logp_V, ref_V = (torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    exact = (logp_V.exp() * (logp_V - ref_V)).sum()
    torch.testing.assert_close((logp_V.exp() * k3(logp_V, ref_V)).sum(), exact)
    assert (k3(logp_V, ref_V) >= 0).all()


def test_the_gradient_of_k3_is_one_minus_the_ratio_of_reference_to_policy():
    logp = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.5, -1.0], dtype=torch.float64, requires_grad=True)
    k3(logp, ref).sum().backward()
    torch.testing.assert_close(logp.grad, 1 - torch.exp(ref - logp).detach())
    assert ref.grad is None


def rates(total, **options):
    settings = {"peak": 2.0, "warmup": 0, "decay": "constant", "final_frac": 0.0, **options}
    return [learning_rate(step, total=total, **settings) for step in range(total)]


def test_learning_rates_by_hand():
    assert rates(3) == [2, 2, 2]
    assert rates(5, warmup=4) == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates(5, decay="linear") == [2.0, 1.5, 1.0, 0.5, 0.0]
    assert rates(5, decay="linear", final_frac=0.5) == [2.0, 1.75, 1.5, 1.25, 1.0]
    assert rates(5, decay="cosine") == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0], abs=1e-15)
    assert rates(6, warmup=2, decay="linear") == [1.0, 2.0, 1.5, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (2, 0), (2, 2), (9, 3), (3, 9)])
def test_learning_rates_rise_then_fall_within_bounds(decay, total, warmup):
    values = rates(total, warmup=warmup, decay=decay, final_frac=0.1)
    top = min(max(warmup - 1, 0), total - 1)
    assert values[: top + 1] == sorted(values[: top + 1])
    assert values[top:] == sorted(values[top:], reverse=True)
    assert all(0 < value <= 2.0 for value in values)
    if warmup < total and total > max(warmup, 1) and decay != "constant":
        assert values[-1] == pytest.approx(0.2)


@pytest.mark.parametrize("step", [-1, 5])
def test_learning_rate_refuses_a_step_outside_the_stage(step):
    with pytest.raises(ValueError, match=f"step {step} is outside a stage of 5 steps"):
        learning_rate(step, total=5, peak=1.0, warmup=0, decay="constant", final_frac=0.0)


def test_seeds_are_pinned_distinct_and_in_range():
    # Fixed for good: a change here would change every run.
    assert derive(0, "rollout", 1, "count-7", 2) == 2423600056880306430
    parts = [(), (1,), ("1",), (1, 2), (12,), ("ab",), ("a", "b"), ("a,b",), ("",), (0,), (-1,), ("é",), (2**70,)]
    seeds = [derive(*part) for part in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_spread_over_the_range():
    seeds = [derive(0, step) for step in range(2000)]
    assert statistics.mean(seeds) / 2**63 == pytest.approx(0.5, abs=0.03)
    assert len({seed % 64 for seed in seeds}) == 64


def test_seeds_are_equal_in_another_process():
    code = "from mmrl.algo.seeds import derive; print(derive(5, 'x'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == derive(5, "x")
