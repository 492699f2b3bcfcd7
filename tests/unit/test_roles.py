"""Parts of a model: every parameter in one of them, and activations recomputed where they are asked for."""

import pytest
import torch

from mmrl.config.schema import Lora
from mmrl.policy.components import census, recompute_activations
from mmrl.policy.families import FAMILIES
from mmrl.policy.lora import Adapter
from mmrl.policy.qwen_vl import Policy


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [None, Lora(targets=("language.mlp", "projector.mlp"))])
def test_the_census_counts_every_parameter_once(tiny, family, lora):
    model = tiny(family).policy.model
    if lora:
        Adapter(model, lora, seed=0)
    counts = census(model)
    assert [each.role for each in counts] == ["vision", "projector", "language"]
    assert sum(each.tensors for each in counts) == len(list(model.parameters()))
    assert sum(each.parameters for each in counts) == sum(parameter.numel() for parameter in model.parameters())
    assert sum(each.trained for each in counts) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert [each.trained > 0 for each in counts] == ([False, True, True] if lora else [True] * 3)
    assert {each.dtypes for each in counts} == {("float32",)}


def test_the_census_tells_frozen_parts_and_types(tiny):
    model = tiny().policy.model
    model.model.visual.to(torch.bfloat16)
    vision, projector, language = census(Policy(model, freeze=("vision",)).model)
    assert (vision.trained, vision.dtypes) == (0, ("bfloat16",))
    assert projector.trained == projector.parameters
    assert language.dtypes == ("float32",)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("roles", [(), ("vision",), ("language",), ("vision", "language")])
def test_only_the_named_parts_are_recomputed(tiny, family, roles):
    model = tiny(family).policy.model
    recompute_activations(model, roles)
    blocks = {"vision": model.model.visual.blocks, "language": model.model.language_model.layers}
    for role, those in blocks.items():
        assert [block.gradient_checkpointing for block in those] == [role in roles] * len(those)
