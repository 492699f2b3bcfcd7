"""AdamW with float32 masters: values by the formula, clipping, components, bad gradients, resuming."""

import copy
import math

import pytest
import torch
from torch import nn

from mmrl.config.schema import OptimizerConfig
from mmrl.learner.optimizer_torch import TorchOptimizer

TYPES = [torch.float32, torch.bfloat16]


def make_optimizer(*parameters, **options):
    """An optimizer of weights of one component, without clipping unless the options say so."""
    config = OptimizerConfig(**({"lr": 1e-6, "max_grad_norm": 1e9} | options))
    return TorchOptimizer({"language": parameters}, config)


def make_component_optimizer(options, **parameters):
    """An optimizer of one weight for each component."""
    return TorchOptimizer({name: [weight] for name, weight in parameters.items()}, OptimizerConfig(**options))


def norm(norms):
    return math.hypot(*norms.values())


def parameter(*values, dtype=torch.float32):
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def test_updates_too_small_for_bfloat16_add_up():
    weight = parameter(1.0, dtype=torch.bfloat16)
    assert weight.detach() - 1e-6 == weight  # a single one is lost
    trained = make_optimizer(weight, lr=1e-6)
    for _ in range(3000):
        trained.backward(weight.sum())
        trained.update(1e-6)
    master = trained.state()["masters"][0]
    assert float(master) == pytest.approx(1 - 3000e-6, abs=1e-4)
    assert float(weight.detach()) == 1 - 2**-8  # the bfloat16 nearest to it


@pytest.mark.parametrize("dtype", TYPES)
def test_updates_equal_those_of_adamw(dtype):
    """Two steps of AdamW by the formula, in float64, with clipping in the first."""
    weight = parameter(1.0, -2.0, dtype=dtype)
    trained = make_optimizer(weight, betas=(0.8, 0.9), weight_decay=0.1, max_grad_norm=1.0)
    w, m, v = [1.0, -2.0], [0.0, 0.0], [0.0, 0.0]
    for step, (gradients, lr) in enumerate([((3.0, 4.0), 0.5), ((0.5, 0.25), 0.25)], start=1):
        trained.backward((weight * torch.tensor(gradients, dtype=dtype)).sum())
        norms = trained.update(lr)
        assert norms == {"language": pytest.approx(math.hypot(*gradients))}
        factor = min(1.0, 1.0 / norms["language"])
        for i, gradient in enumerate(gradients):
            g = gradient * factor
            m[i], v[i] = 0.8 * m[i] + 0.2 * g, 0.9 * v[i] + 0.1 * g * g
            w[i] *= 1 - lr * 0.1
            w[i] -= lr * (m[i] / (1 - 0.8**step)) / (math.sqrt(v[i] / (1 - 0.9**step)) + 1e-8)
    masters = trained.state()["masters"]
    assert bool(masters) == (dtype == torch.bfloat16)  # float32 weights are their own masters
    masters = masters or {0: weight}
    assert masters[0].tolist() == pytest.approx(w, rel=1e-4)
    assert torch.equal(weight, masters[0].to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_the_norm_is_over_all_parameters_and_gradients_add_up(dtype):
    a, b, idle = parameter(1.0, dtype=dtype), parameter(1.0, dtype=dtype), parameter(5.0, dtype=dtype)
    trained = make_optimizer(a, b, idle)
    trained.backward(a.sum() * 1.0)
    trained.backward(a.sum() * 2.0 + b.sum() * 4.0)
    assert norm(trained.update(0.1)) == pytest.approx(5.0)
    assert float(idle.detach()) == 5.0
    assert a.grad is b.grad is idle.grad is None
    assert norm(trained.update(0.1)) == 0.0  # nothing is left of the gradients


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_in_any_component(dtype, bad):
    vision, language = parameter(1.0, dtype=dtype), parameter(1.0, dtype=dtype)
    trained = make_component_optimizer({"lr": 0.25}, vision=vision, language=language)
    trained.backward(vision.sum() + language.sum())
    trained.update(0.25)
    before = copy.deepcopy((vision, language, trained.state()["moments"]))
    trained.backward(vision.sum() * bad + language.sum())
    norms = trained.update(0.25)
    assert not math.isfinite(norms["vision"]) and norms["language"] == 1.0
    assert (vision, language) == before[:2]
    for index, moments in trained.state()["moments"].items():
        assert all(torch.equal(moments[name], before[2][index][name]) for name in moments)
    trained.backward(vision.sum() + language.sum())
    assert norm(trained.update(0.25)) == pytest.approx(math.sqrt(2))
    assert vision < before[0]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_restored_optimizer_makes_the_same_updates(dtype, tmp_path):
    def steps(trained, weight, count):
        for k in range(count):
            trained.backward((weight**2).sum() * (k + 1))
            trained.update(0.01)

    weight = parameter(1.0, 2.0, 3.0, dtype=dtype)
    straight = make_optimizer(weight)
    steps(straight, weight, 5)
    torch.save({"optimizer": straight.state(), "weight": weight.data}, tmp_path / "state")
    saved = torch.load(tmp_path / "state", weights_only=True)
    steps(straight, weight, 5)

    again = nn.Parameter(saved["weight"])
    resumed = make_optimizer(again)
    resumed.load_state(saved["optimizer"])
    steps(resumed, again, 5)
    assert torch.equal(again, weight)
    ours, theirs = resumed.state()["masters"], straight.state()["masters"]
    assert len(ours) == len(theirs) == (dtype == torch.bfloat16)
    assert all(torch.equal(ours[place], theirs[place]) for place in theirs)


def test_norms_are_those_of_components_and_clipping_is_by_all_of_them():
    vision, language = parameter(0.0), parameter(0.0)
    trained = make_component_optimizer(
        {"lr": 1.0, "max_grad_norm": 1.0}, vision=vision, projector=parameter(0.0), language=language
    )
    trained.backward(3.0 * vision.sum() - 4.0 * language.sum())
    assert trained.update(1.0) == pytest.approx({"vision": 3.0, "projector": 0.0, "language": 4.0})
    first, idle, second = trained.state()["moments"].values()
    assert float(idle["exp_avg"]) == 0.0  # the projector had no gradient
    assert float(first["exp_avg"]) == pytest.approx(0.1 * 3 / 5, rel=1e-5)
    assert float(second["exp_avg"]) == pytest.approx(0.1 * -4 / 5, rel=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_component_can_have_another_rate_and_follows_the_schedule(dtype):
    vision, language = parameter(0.0, dtype=dtype), parameter(0.0, dtype=dtype)
    trained = make_component_optimizer(
        {"lr": 0.1, "lr_by_component": {"vision": 0.02}}, vision=vision, language=language
    )
    trained.backward(vision.sum() + language.sum())
    trained.update(0.05)  # half of the peak; AdamW's first step is the rate itself
    assert float(vision.detach()) == pytest.approx(-0.01, rel=1e-2)
    assert float(language.detach()) == pytest.approx(-0.05, rel=1e-2)


@pytest.mark.parametrize(("decayed", "bias_after"), [("all", 0.9), ("matrices", 1.0)])
def test_vectors_can_be_spared_weight_decay(decayed, bias_after):
    matrix, bias = nn.Parameter(torch.ones(2, 2)), parameter(1.0, 1.0)
    options = OptimizerConfig(lr=0.1, weight_decay=1.0, weight_decay_on=decayed)
    trained = TorchOptimizer({"language": [bias, matrix]}, options)
    trained.backward(0.0 * (matrix.sum() + bias.sum()))
    trained.update(0.1)
    assert matrix.flatten().tolist() == pytest.approx([0.9] * 4)
    assert bias.tolist() == pytest.approx([bias_after] * 2)
