"""Parts of a model: every parameter in one of them, and activations recomputed where they are asked for."""

import pytest
import torch

from mmrl.config.schema import LoraConfig
from mmrl.policy.build import enable_gradient_checkpointing, summarize_components
from mmrl.policy.families import FAMILIES
from mmrl.policy.lora import LoraAdapter
from mmrl.policy.policy import PolicyModel


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [None, LoraConfig(targets=("language.attention", "projector.mlp"))])
def test_the_census_counts_every_parameter_once(make_tiny, family, lora):
    policy = make_tiny(family).policy
    model = policy.model
    if lora:
        LoraAdapter(model, lora, seed=0)
    counts = summarize_components(model, policy.family)
    assert [each.component for each in counts] == ["vision", "projector", "language"]
    assert sum(each.num_tensors for each in counts) == len(list(model.parameters()))
    assert sum(each.num_parameters for each in counts) == sum(parameter.numel() for parameter in model.parameters())
    assert sum(each.num_trained for each in counts) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert [each.num_trained > 0 for each in counts] == ([False, True, True] if lora else [True] * 3)
    assert {each.dtypes for each in counts} == {("float32",)}


def test_the_census_tells_frozen_parts_and_types(make_tiny):
    model = make_tiny().policy.model
    model.model.visual.to(torch.bfloat16)
    policy = PolicyModel(model, freeze=("vision",))
    vision, projector, language = summarize_components(policy.model, policy.family)
    assert (vision.num_trained, vision.dtypes) == (0, ("bfloat16",))
    assert projector.num_trained == projector.num_parameters
    assert language.dtypes == ("float32",)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("roles", [(), ("vision",), ("language",), ("vision", "language")])
def test_only_the_named_parts_are_recomputed(make_tiny, family, roles):
    model = make_tiny(family).policy.model
    enable_gradient_checkpointing(model, roles, FAMILIES[family])
    blocks = {"vision": model.model.visual.blocks, "language": model.model.language_model.layers}
    for role, those in blocks.items():
        assert [block.gradient_checkpointing for block in those] == [role in roles] * len(those)
