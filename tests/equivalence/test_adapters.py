"""A low-rank adapter against dense weights: equal log-probs and gradients, and no effect when it is new."""

import copy
from dataclasses import replace

import pytest
import torch
from families import FAST_FAMILIES
from learning import make_off_policy_experiences, perturbed_copy, relative_difference, step_gradient
from peft import PeftModel
from rounding import GRADIENTS, LOGPROBS
from torch import nn

from mmrl.config.schema import LoraConfig, OptimizerConfig
from mmrl.learner.optimizer_torch import TorchOptimizer
from mmrl.policy.batch import collate, group_by_prompt
from mmrl.policy.build import enable_gradient_checkpointing
from mmrl.policy.families import FAMILIES, get_family
from mmrl.policy.lora import LoraAdapter
from mmrl.policy.policy import PolicyModel
from mmrl.types import UserError

EVERYWHERE = ("language.attention", "language.mlp", "vision.attention", "vision.mlp", "projector.mlp")
VARIANTS = {
    "lora": {"rank": 3, "alpha": 6},
    "rslora": {"rank": 4, "alpha": 6, "use_rslora": True},
    "dora": {"rank": 3, "alpha": 5, "use_dora": True},
}
CELLS = [*((family, "lora") for family in FAMILIES), ("qwen2_5_vl", "rslora"), *((f, "dora") for f in FAST_FAMILIES)]


def everywhere(family, variant="lora"):
    """An adapter on every target that a tiny model of the family has."""
    targets = [target for target in EVERYWHERE if (family, target) != ("qwen3_vl_moe", "language.mlp")]
    # peft knows no DoRA of a fused parameter.
    if variant != "dora":
        targets += FAMILIES[family].lora_parameters
    return LoraConfig(**VARIANTS[variant], targets=tuple(targets))


def adapted(tiny, lora, *, learned=True):
    """The tiny model with an adapter in its model; a learned one changes the weights by a few percent."""
    adapter = LoraAdapter(tiny.policy.model, lora, seed=7)
    if learned:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in (p for p in tiny.policy.model.parameters() if p.requires_grad):
                parameter.add_(0.1 * parameter.std() + 0.02 * torch.randn(parameter.shape, generator=generator))
    return replace(tiny, policy=PolicyModel(tiny.policy.model)), adapter


def layers(model):
    """Every adapted layer by the name that it has in the model."""
    return {name: module for name, module in model.named_modules() if "lora_A" in dict(module.named_children())}


def adapted_name(name, layer):
    """The name, in a plain model, of the weight that a layer adapts."""
    if not hasattr(layer, "parameter_name"):
        return f"{name}.weight"
    # Adapters of two parameters of one module stand inside each other.
    return f"{name.replace('.base_layer', '')}.{layer.parameter_name}"


def dense_weight(layer, lora):
    """W' by the formulas of the papers; DoRA's section 4.3 takes the length of V for a constant."""
    scale = lora.alpha / (lora.rank**0.5 if lora.use_rslora else lora.rank)
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    if hasattr(layer, "parameter_name"):
        # Experts: their rows of A follow each other, and their columns of B alternate.
        base = layer.get_param()
        by_expert = zip(base, down.chunk(len(base)), strict=True)
        return torch.stack([weight + scale * up[:, i :: len(base)] @ own for i, (weight, own) in enumerate(by_expert)])
    updated = layer.base_layer.weight + scale * up @ down
    if not lora.use_dora:
        return updated
    length = updated.norm(dim=1, keepdim=True).detach()
    return layer.lora_magnitude_vector["default"].weight[:, None] * updated / length


def densified(tiny, lora):
    """A plain model whose weights are what the adapter makes of them; and the layers these came from."""
    own = layers(tiny.policy.model)
    plain = copy.deepcopy(tiny.policy.without_adapter().model).requires_grad_(True)
    with torch.no_grad():
        for name, layer in own.items():
            plain.get_parameter(adapted_name(name, layer)).copy_(dense_weight(layer, lora))
    return replace(tiny, policy=PolicyModel(plain)), own


def scores(policy, tiny, experiences):
    batch = collate(group_by_prompt(experiences), tiny.processor, pad_id=tiny.eos_id)
    with torch.no_grad():
        return policy.compute_logprobs(batch).logprobs_N


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_are_all_linear_layers_of_their_roles(make_tiny, family):
    model = make_tiny(family).policy.model
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    of = {target: set() for target in EVERYWHERE}
    for name in linear:
        role = get_family(model.config).component_of(f"{name}.weight")
        # Left out of Gated DeltaNet: projections of a few rows, which set decay and write strength.
        if name.endswith(("in_proj_a", "in_proj_b", "shared_expert_gate")):
            continue
        part = "attention" if {"attn", "self_attn", "linear_attn"} & set(name.split(".")) else "mlp"
        of[f"{role}.{part}"].add(name)
    assert {target for target, names in of.items() if not names} <= {"language.mlp"}
    for target, names in of.items():
        if not names:
            continue
        fresh = make_tiny(family).policy.model
        LoraAdapter(fresh, LoraConfig(targets=(target,)), seed=0)
        assert set(layers(fresh)) == names


@pytest.mark.parametrize(("family", "variant"), CELLS)
def test_gradients_of_an_adapter_follow_from_those_of_dense_weights(make_tiny, family, variant):
    lora = everywhere(family, variant)
    tiny, _ = adapted(make_tiny(family), lora)
    experiences = make_off_policy_experiences(tiny, group_size=2)
    metrics, ours = step_gradient(tiny, experiences)
    plain, own = densified(tiny, lora)
    expected, dense = step_gradient(plain, experiences)
    assert metrics["learner/loss"] == pytest.approx(expected["learner/loss"], rel=1e-4)
    theirs = {}
    for name, layer in own.items():
        factors = {n: p for n, p in layer.named_parameters() if p.requires_grad and "base_layer" not in n}
        assert len(factors) == (3 if lora.use_dora else 2)
        gradients = torch.autograd.grad(dense_weight(layer, lora), factors.values(), dense[adapted_name(name, layer)])
        theirs |= {f"{name}.{factor}": slope for factor, slope in zip(factors, gradients, strict=True)}
    assert {tiny.policy.family.component_of(name) for name in ours} == {"vision", "projector", "language"}
    assert relative_difference(theirs, ours) < GRADIENTS


@pytest.mark.parametrize("family", FAST_FAMILIES)
def test_a_gradient_through_an_adapter_does_not_depend_on_batching_or_recomputing(make_tiny, family):
    tiny, _ = adapted(make_tiny(family), everywhere(family))
    experiences = make_off_policy_experiences(tiny)
    penalty = {"kl": {"coef": 0.1}, "reference": perturbed_copy(tiny.policy)}
    metrics, whole = step_gradient(tiny, experiences, **penalty)
    assert metrics["policy/reference_kl_nats"] > 0
    _, plain = step_gradient(tiny, experiences, shared_prefix=False, micro_batch_groups=2, **penalty)
    assert relative_difference(whole, plain) < GRADIENTS
    enable_gradient_checkpointing(tiny.policy.model, ("vision", "language"), tiny.policy.family)
    _, recomputed = step_gradient(tiny, experiences, **penalty)
    assert relative_difference(whole, recomputed) < GRADIENTS


@pytest.mark.parametrize(("family", "variant"), CELLS)
def test_without_its_adapter_the_policy_is_the_base_model(make_tiny, family, variant):
    base = make_tiny(family)
    experiences = make_off_policy_experiences(base, group_size=2)
    expected = scores(base.policy, base, experiences)
    new, _ = adapted(make_tiny(family), everywhere(family, variant), learned=False)
    torch.testing.assert_close(scores(new.policy, new, experiences), expected, rtol=0, atol=LOGPROBS)
    tiny, _ = adapted(make_tiny(family), everywhere(family, variant))
    off = tiny.policy.without_adapter()
    torch.testing.assert_close(scores(off, tiny, experiences), expected, rtol=0, atol=LOGPROBS)
    assert (scores(tiny.policy, tiny, experiences) - expected).abs().max() > 1e-2
    own = set(map(id, tiny.policy.model.parameters()))
    assert {id(parameter) for parameter in off.model.parameters()} < own  # it shares all of its weights


@pytest.mark.parametrize("freeze", [(), ("vision", "projector")])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=3, alpha=6, targets=("language.mlp",))])
def test_a_reference_shares_what_is_frozen_and_stays_when_the_policy_moves(make_tiny, freeze, lora):
    tiny = make_tiny()
    if lora:
        tiny, _ = adapted(tiny, lora)
    tiny = replace(tiny, policy=PolicyModel(tiny.policy.model, freeze=freeze))
    experiences = make_off_policy_experiences(tiny, group_size=2)
    reference, before = tiny.policy.frozen_copy(), scores(tiny.policy, tiny, experiences)
    given = {name: id(parameter) for name, parameter in tiny.policy.frozen.items()}
    assert {name: id(parameter) for name, parameter in reference.frozen.items()} == given
    assert reference.trainable.keys() == tiny.policy.trainable.keys()
    assert not {id(p) for p in reference.trainable.values()} & {id(p) for p in tiny.policy.trainable.values()}
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())
    step_gradient(tiny, experiences)
    optimizer = TorchOptimizer(tiny.policy.trained_by_component, OptimizerConfig(lr=0.01))
    optimizer.update(0.01)
    assert (scores(tiny.policy, tiny, experiences) - before).abs().max() > 1e-2
    assert torch.equal(scores(reference, tiny, experiences), before)


@pytest.mark.parametrize(("family", "variant"), CELLS)
def test_merged_weights_and_a_loaded_adapter_give_the_same_log_probs(make_tiny, family, variant, tmp_path):
    tiny, adapter = adapted(make_tiny(family), everywhere(family, variant))
    experiences = make_off_policy_experiences(tiny, group_size=2)
    expected = scores(tiny.policy, tiny, experiences)
    adapter.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(make_tiny(family).policy.model, str(tmp_path))
    loaded = PolicyModel(again.get_base_model())
    torch.testing.assert_close(scores(loaded, tiny, experiences), expected, rtol=0, atol=LOGPROBS)
    adapter.merge()
    assert not layers(tiny.policy.model)
    torch.testing.assert_close(scores(tiny.policy, tiny, experiences), expected, rtol=0, atol=LOGPROBS)


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_an_adapter_of_experts_alone_learns_and_is_merged(make_tiny, family):
    tiny, adapter = adapted(make_tiny(family), LoraConfig(rank=2, targets=("language.experts",)))
    experiences = make_off_policy_experiences(tiny, group_size=2)
    expected = scores(tiny.policy, tiny, experiences)
    _, learned = step_gradient(tiny, experiences)
    assert learned and all(".experts." in name for name in learned)
    assert all(own.any() for own in learned.values())
    adapter.merge()
    torch.testing.assert_close(scores(tiny.policy, tiny, experiences), expected, rtol=0, atol=LOGPROBS)


def test_an_adapter_depends_on_its_seed_alone_and_stays_float32(make_tiny):
    def made(seed, dtype=torch.float32):
        model = make_tiny().policy.model.to(dtype)
        LoraAdapter(model, LoraConfig(), seed=seed)
        return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, same, other, narrow = made(1), made(1), made(2), made(1, torch.bfloat16)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert {parameter.dtype for parameter in narrow.values()} == {torch.float32}


def test_dropout_is_for_training_alone(make_tiny):
    tiny, _ = adapted(make_tiny(), LoraConfig(dropout=0.5))
    experiences = make_off_policy_experiences(tiny, group_size=2)
    assert torch.equal(scores(tiny.policy, tiny, experiences), scores(tiny.policy, tiny, experiences))
    (_, one), (_, two) = step_gradient(tiny, experiences), step_gradient(tiny, experiences)
    assert relative_difference(one, two) > 1e-2


def test_a_target_that_the_model_does_not_have_is_refused(make_tiny):
    with pytest.raises(UserError, match=r"this qwen3_vl_moe has no layer of language.mlp; it has language.attention, "):
        LoraAdapter(make_tiny("qwen3_vl_moe").policy.model, LoraConfig(targets=("language.mlp",)), seed=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_by_default_an_adapter_is_on_layers_that_every_token_passes(make_tiny, family):
    model = make_tiny(family).policy.model
    LoraAdapter(model, LoraConfig(), seed=0)
    names = list(layers(model))
    assert names and not any("visual" in name or name.endswith("experts") for name in names)
    assert any("attn" in name for name in names)
