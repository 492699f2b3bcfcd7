"""The formulas, against hand-computed values, independent slow versions and analytic gradients."""

import math
import random

import pytest
import torch

from mmrl.algo.losses import (
    aggregation_weights,
    cispo,
    clipped_surrogate,
    correction_weights,
    estimate_kl,
    importance_ratios,
    mirror_descent,
    suffix_sums,
)
from mmrl.config.schema import RolloutCorrectionConfig


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


def test_cispo_equals_the_surrogate_where_nothing_is_clipped_and_keeps_the_gradient_elsewhere():
    ratio = torch.tensor([0.9, 1.0, 1.15, 1.5, 0.5], dtype=torch.float64)
    advantage = torch.tensor([1.0, -2.0, 3.0, 1.0, -1.0], dtype=torch.float64)
    leaves = [ratio.log().requires_grad_() for _ in range(2)]
    clipped_surrogate(leaves[0].exp(), advantage, 0.2, 0.2).sum().backward()
    cispo(leaves[1], leaves[1].exp(), advantage, 0.2, 0.2).sum().backward()
    gradients = [leaf.grad for leaf in leaves]
    torch.testing.assert_close(gradients[0][:3], gradients[1][:3])
    torch.testing.assert_close(gradients[1], torch.tensor([-0.9, 2.0, -3.45, -1.2, 0.8], dtype=torch.float64))
    assert gradients[0][3:].tolist() == [0.0, 0.0]


def test_mirror_descent_has_the_gradient_of_the_squared_residual_of_kimi_k1_5():
    """L = (r - mean r - tau log ratio)^2 of a whole response (2.3.2), over 2 tau; r - mean r is the advantage."""
    rng = random.Random(1)
    for _ in range(50):
        size, advantage, tau = rng.randint(1, 9), rng.uniform(-1, 1), rng.uniform(0.05, 2)
        old = torch.tensor([rng.uniform(-4, -0.1) for _ in range(size)], dtype=torch.float64)
        current = (old + torch.tensor([rng.gauss(0, 0.3) for _ in range(size)])).requires_grad_()
        mask = torch.ones(size, dtype=torch.bool)
        losses = mirror_descent(current, old, torch.full_like(old, advantage), mask, tau=tau)
        assert losses.shape == (size,)
        (ours,) = torch.autograd.grad(losses.sum(), current)
        residual = advantage - tau * sum(new - then for new, then in zip(current.tolist(), old.tolist(), strict=True))
        # d residual / d log-prob is -tau for each token, so that of residual^2 / (2 tau) is -residual.
        torch.testing.assert_close(ours, torch.full_like(old, -residual))


def test_mirror_descent_leaves_out_what_the_mask_does():
    logprobs, old = torch.tensor([-1.0, -2.0, -7.0], dtype=torch.float64), torch.tensor([-1.5, -2.0, -1.0])
    padded = mirror_descent(logprobs, old, torch.ones(3), torch.tensor([True, True, False]), tau=0.5)
    torch.testing.assert_close(
        padded[:2], mirror_descent(logprobs[:2], old[:2], torch.ones(2), torch.ones(2) > 0, tau=0.5)
    )
    assert padded[2] == 0.0
    assert padded.sum().item() == pytest.approx(3.0 + 0.25 * 0.5**2)  # -A log policy + tau / 2 s^2


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
    ("ratio", "advantage", "dual_clip", "gradient"),
    [
        (1.5, 1.0, None, 0.0),  # above the range and good: clipped
        (0.5, -1.0, None, 0.0),  # below the range and bad: clipped
        (0.5, 1.0, None, -0.5),  # below the range but good: pulled back, d(-rA)/dlogp = -rA
        (1.5, -1.0, None, 1.5),  # above the range but bad: pushed back
        (1.1, 1.0, None, -1.1),
        (0.9, -1.0, None, 0.9),
        (1.1, 0.0, None, 0.0),
        (2.9, -1.0, 3.0, 2.9),
        (3.1, -1.0, 3.0, 0.0),  # bad and far likelier: stopped by dual clip
    ],
)
def test_clipping_stops_the_gradient(ratio, advantage, dual_clip, gradient):
    logp = torch.tensor(math.log(ratio), dtype=torch.float64, requires_grad=True)
    clipped_surrogate(logp.exp(), torch.tensor(advantage, dtype=torch.float64), 0.2, 0.2, dual_clip).backward()
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"method": "none"}, [1.0] * 6),
        ({"method": "tis", "high": 2.0}, [0.0, 0.4, 0.5, 1.0, 2.0, 2.0]),
        ({"method": "mask", "low": 0.5, "high": 5.0}, [0.0, 0.0, 0.5, 1.0, 5.0, 0.0]),
        ({"method": "tis", "high": 2.0, "level": "sequence"}, [0.0] * 3 + [2.0] * 3),  # of products 0 and 25.5
    ],
)
def test_correction_weights_by_hand(options, expected):
    log_weight_N = torch.tensor([0.0, 0.4, 0.5, 1.0, 5.0, 5.1], dtype=torch.float64).log()
    response_N = torch.tensor([0, 0, 0, 1, 1, 1])
    found = correction_weights(log_weight_N, response_N, RolloutCorrectionConfig(**options))
    assert found.tolist() == pytest.approx(expected)


def test_suffix_sums_by_the_definition():
    values = noise(2)
    slow = [x[t:].sum() for x in by_response(values) for t in range(len(x))]
    torch.testing.assert_close(suffix_sums(values, SEQUENCES), torch.stack(slow))
    assert suffix_sums(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_suffix_sums_do_not_depend_on_earlier_responses():
    small = torch.tensor([1e-3, 2e-3])
    both = suffix_sums(torch.cat([torch.full((1000,), 1e3), small]), torch.tensor([0] * 1000 + [1, 1]))
    torch.testing.assert_close(both[-2:], suffix_sums(small, torch.tensor([0, 0])), rtol=1e-5, atol=0)


def test_aggregations_by_the_definition():
    options = {"num_tokens": 7, "num_responses": 3, "lengths_N": torch.full((7,), 8.0)}
    token, sequence, fixed = (aggregation_weights(SEQUENCES, how, **options) for how in ("token", "sequence", "fixed"))
    losses = noise(3).float()
    torch.testing.assert_close((token * losses).sum(), losses.mean())
    torch.testing.assert_close((sequence * losses).sum(), torch.stack([x.mean() for x in by_response(losses)]).mean())
    torch.testing.assert_close((fixed * losses).sum(), losses.sum() / 8 / 3)


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
def test_an_estimate_in_the_loss_has_the_gradient_of_a_kl(name, expected):
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


def test_no_gradient_flows_into_the_reference_or_beyond_the_clip():
    logp = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.5, -100.0], dtype=torch.float64, requires_grad=True)
    estimate_kl(logp, ref, "k3", log_ratio_clip=10.0).sum().backward()
    torch.testing.assert_close(logp.grad, torch.tensor([1 - math.exp(-0.5), 0.0], dtype=torch.float64))
    assert ref.grad is None
