"""The formulas, against hand-computed values, independent slow versions and analytic gradients."""

import math
import random
import statistics
import subprocess
import sys

import pytest
import torch

from mmrl.algo.losses import (
    aggregation_weights,
    cispo,
    clipped_surrogate,
    coefficient,
    estimate_kl,
    importance_ratios,
    learning_rate,
    mask_weights,
    suffix_sums,
    truncate_weights,
)
from mmrl.config.schema import LossCoefficientConfig
from mmrl.utils.seeds import derive_seed


def test_the_surrogate_by_hand():
    ratio = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5])
    advantage = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0])
    loss = clipped_surrogate(ratio, advantage, 0.2, 0.3)
    # -min: unclipped at ratio 1; 1.3 * 2; 0.5 * 2; -1.5 * 2; -0.8 * 2
    torch.testing.assert_close(loss, torch.tensor([-2.0, -2.6, -1.0, 3.0, 1.6]))


def test_the_surrogate_equals_a_slow_version():
    rng = random.Random(0)
    for _ in range(300):
        ratio, advantage, bound = math.exp(rng.uniform(-3, 3)), rng.uniform(-2, 2), rng.choice([None, 1.5, 3.0])
        low, high = rng.uniform(0.05, 0.5), rng.uniform(0.05, 0.5)
        slow = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        if bound is not None and advantage < 0:
            slow = max(slow, bound * advantage)
        fast = clipped_surrogate(*(torch.tensor(x, dtype=torch.float64) for x in (ratio, advantage)), low, high, bound)
        assert fast.item() == pytest.approx(-slow, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize(("ratio", "gradient"), [(1.1, 1.1), (2.9, 2.9), (3.1, 0.0), (50.0, 0.0)])
def test_dual_clip_stops_the_gradient_of_what_was_bad_and_became_far_likelier(ratio, gradient):
    logp = torch.tensor(math.log(ratio), dtype=torch.float64, requires_grad=True)
    clipped_surrogate(logp.exp(), torch.tensor(-1.0, dtype=torch.float64), 0.2, 0.2, 3.0).backward()
    assert logp.grad.item() == pytest.approx(gradient)


def test_cispo_equals_the_surrogate_where_nothing_is_clipped_and_keeps_every_gradient_elsewhere():
    ratio = torch.tensor([0.9, 1.0, 1.15, 1.5, 0.5], dtype=torch.float64)
    advantage = torch.tensor([1.0, -2.0, 3.0, 1.0, -1.0], dtype=torch.float64)
    leaves = [ratio.log().requires_grad_() for _ in range(2)]
    clipped_surrogate(leaves[0].exp(), advantage, 0.2, 0.2).sum().backward()
    cispo(leaves[1], leaves[1].exp(), advantage, 0.2, 0.2).sum().backward()
    gradients = [leaf.grad for leaf in leaves]
    torch.testing.assert_close(gradients[0][:3], gradients[1][:3])
    torch.testing.assert_close(gradients[1], torch.tensor([-0.9, 2.0, -3.45, -1.2, 0.8], dtype=torch.float64))
    assert gradients[0][3:].tolist() == [0.0, 0.0]


def test_at_ratio_one_the_gradient_is_the_policy_gradient():
    # d/dz of -A log softmax(z)[a] is -A (onehot(a) - softmax(z)): REINFORCE, computed here without autograd.
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(6, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    chosen_T = torch.tensor([0, 4, 2, 2, 1, 3])
    advantage_T = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, -0.1], dtype=torch.float64)
    logp_T = logits_TV.log_softmax(-1).gather(-1, chosen_T[:, None])[:, 0]
    clipped_surrogate((logp_T - logp_T.detach()).exp(), advantage_T, 0.2, 0.2).sum().backward()
    onehot_TV = torch.nn.functional.one_hot(chosen_T, 5)
    analytic_TV = -advantage_T[:, None] * (onehot_TV - logits_TV.detach().softmax(-1))
    torch.testing.assert_close(logits_TV.grad, analytic_TV)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
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
def test_where_clipping_stops_the_gradient(ratio, advantage, gradient):
    logp = torch.tensor(math.log(ratio), dtype=torch.float64, requires_grad=True)
    clipped_surrogate(logp.exp(), torch.tensor(advantage, dtype=torch.float64), 0.2, 0.2).backward()
    assert logp.grad.item() == pytest.approx(gradient, abs=1e-12)


LENGTHS = (1, 4, 2)
SEQUENCES = torch.tensor([0, 1, 1, 1, 1, 2, 2])


def noise(seed, count=7):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_response(values):
    return values.split(LENGTHS)


def test_ratios_by_the_definition():
    log_ratio = noise(0)
    token, sequence = (importance_ratios(log_ratio, SEQUENCES, kind) for kind in ("token", "sequence"))
    slow = [math.prod(x.exp().tolist()) ** (1 / len(x)) for x in by_response(log_ratio) for _ in x]
    torch.testing.assert_close(token, log_ratio.exp())
    torch.testing.assert_close(sequence, torch.tensor(slow, dtype=torch.float64))
    assert token[0] == pytest.approx(sequence[0])  # a response of one token


def test_importance_weights_by_hand():
    weight = torch.tensor([0.0, 0.4, 0.5, 1.0, 5.0, 5.1, math.inf])
    assert truncate_weights(weight, 2.0).tolist() == pytest.approx([0.0, 0.4, 0.5, 1.0, 2.0, 2.0, 2.0])
    assert mask_weights(weight, 0.5, 5.0).tolist() == [0.0, 0.0, 0.5, 1.0, 5.0, 0.0, 0.0]


def test_remaining_sums_by_the_definition():
    values = noise(2)
    slow = [x[t:].sum() for x in by_response(values) for t in range(len(x))]
    torch.testing.assert_close(suffix_sums(values, SEQUENCES), torch.stack(slow))
    assert suffix_sums(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_a_responses_remaining_sum_does_not_depend_on_what_stands_before_it():
    small = torch.tensor([1e-3, 2e-3])
    both = suffix_sums(torch.cat([torch.full((1000,), 1e3), small]), torch.tensor([0] * 1000 + [1, 1]))
    torch.testing.assert_close(both[-2:], suffix_sums(small, torch.tensor([0, 0])), rtol=1e-5, atol=0)


def test_shares_by_the_definition():
    options = {"num_tokens": 7, "num_responses": 3, "lengths_N": torch.full((7,), 8.0)}
    token, sequence, fixed = (
        aggregation_weights(SEQUENCES, kind, **options) for kind in ("token", "sequence", "fixed")
    )
    losses = noise(3).float()
    torch.testing.assert_close((token * losses).sum(), losses.mean())
    torch.testing.assert_close((sequence * losses).sum(), torch.stack([x.mean() for x in by_response(losses)]).mean())
    torch.testing.assert_close((fixed * losses).sum(), losses.sum() / 8 / 3)


def test_all_aggregations_agree_on_responses_of_full_length():
    sequences = torch.arange(3).repeat_interleave(4)
    options = {"num_tokens": 12, "num_responses": 3, "lengths_N": torch.full((12,), 4.0)}
    found = [aggregation_weights(sequences, kind, **options) for kind in ("token", "sequence", "fixed")]
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


def test_kl_estimates_by_hand():
    logp = torch.log(torch.tensor([0.5, 0.25], dtype=torch.float64))
    ref = torch.log(torch.tensor([0.5, 0.5], dtype=torch.float64))
    d = math.log(2)
    expected = {"k1": [0.0, -d], "k2": [0.0, d * d / 2], "k3": [0.0, 2 - d - 1]}
    for name, values in expected.items():
        assert estimate_kl(logp, ref, name).tolist() == pytest.approx(values)
        assert estimate_kl(logp, ref, name, log_ratio_clip=100.0).tolist() == pytest.approx(values)
    assert estimate_kl(logp, ref, "k3", log_ratio_clip=0.1).tolist() == pytest.approx([0.0, math.exp(0.1) - 0.1 - 1])


def distributions(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2)]


def test_the_means_of_k1_and_k3_under_the_policy_are_the_kl():
    logp_V, ref_V = distributions()
    exact = (logp_V.exp() * (logp_V - ref_V)).sum()
    for name in ("k1", "k3"):
        torch.testing.assert_close((logp_V.exp() * estimate_kl(logp_V, ref_V, name)).sum(), exact)
    assert (estimate_kl(logp_V, ref_V, "k3") >= 0).all()
    assert (estimate_kl(logp_V, ref_V, "k2") >= 0).all()


@pytest.mark.parametrize(("name", "expected"), [("k1", "none"), ("k2", "reverse"), ("k3", "forward")])
def test_what_an_estimate_in_the_loss_pulls_towards(name, expected):
    """On average over tokens of the policy: k2 follows the gradient of KL(policy || reference), k3 that of
    KL(reference || policy), k1 none at all."""
    logits_V, ref_V = distributions()
    leaf = logits_V.clone().requires_grad_()
    logp_V = leaf.log_softmax(-1)
    (logp_V.detach().exp() * estimate_kl(logp_V, ref_V, name)).sum().backward()
    exact = logits_V.clone().requires_grad_()
    of_exact = exact.log_softmax(-1)
    kl = {
        "none": (of_exact * 0).sum(),
        "reverse": (of_exact.exp() * (of_exact - ref_V)).sum(),
        "forward": (ref_V.exp() * (ref_V - of_exact)).sum(),
    }[expected]
    kl.backward()
    torch.testing.assert_close(leaf.grad, exact.grad, atol=1e-12, rtol=1e-9)


def test_no_gradient_flows_into_the_reference_nor_beyond_the_clamp():
    logp = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.5, -100.0], dtype=torch.float64, requires_grad=True)
    estimate_kl(logp, ref, "k3", log_ratio_clip=10.0).sum().backward()
    torch.testing.assert_close(logp.grad, torch.tensor([1 - math.exp(-0.5), 0.0], dtype=torch.float64))
    assert ref.grad is None


def test_a_coefficient_follows_its_course():
    options = LossCoefficientConfig(coef=0.4, schedule="linear", final_frac=0.5)
    values = [coefficient(step, total=5, options=options) for step in range(5)]
    assert values == pytest.approx([0.4, 0.35, 0.3, 0.25, 0.2])
    assert coefficient(3, total=5, options=LossCoefficientConfig(coef=0.4)) == 0.4


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
    assert derive_seed(0, "rollout", 1, "count-7", 2) == 2423600056880306430
    parts = [(), (1,), ("1",), (1, 2), (12,), ("ab",), ("a", "b"), ("a,b",), ("",), (0,), (-1,), ("é",), (2**70,)]
    seeds = [derive_seed(*part) for part in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_spread_over_the_range():
    seeds = [derive_seed(0, step) for step in range(2000)]
    assert statistics.mean(seeds) / 2**63 == pytest.approx(0.5, abs=0.03)
    assert len({seed % 64 for seed in seeds}) == 64


def test_seeds_are_equal_in_another_process():
    code = "from mmrl.utils.seeds import derive_seed; print(derive_seed(5, 'x'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == derive_seed(5, "x")
