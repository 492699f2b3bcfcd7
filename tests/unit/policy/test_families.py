"""The families against the models of Qwen in the installed transformers and vLLM, and each family as a plug-in."""

import ast
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from processors import make_prompt_processor
from transformers.models.auto import modeling_auto

from mmrl.config.schema import ModelConfig
from mmrl.policy.families import FAMILIES, load_family
from mmrl.policy.policy import PolicyModel
from mmrl.policy.pretrained import load_pretrained
from mmrl.utils.model_files import UNSUPPORTED


def known_to_transformers() -> dict[str, str]:
    """The class of each model type of Qwen that reads text beside images, videos or sound."""
    known = {
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    return {model_type: name for model_type, name in known.items() if model_type.startswith("qwen")}


def test_each_model_type_of_qwen_is_a_family_or_unsupported_with_a_reason():
    assert set(known_to_transformers()) == set(FAMILIES) | set(UNSUPPORTED)
    assert not set(FAMILIES) & set(UNSUPPORTED)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_loads_the_class_that_transformers_loads(model_type):
    family = FAMILIES[model_type]
    assert family.model_type == model_type == family.model_class.config_class.model_type
    assert family.model_class.__name__ == known_to_transformers()[model_type]


# Models of Qwen in vLLM that transformers has no class of this name for.
OTHERS_OF_VLLM = {
    "Qwen2_5OmniModel": "another name of Qwen2_5OmniForConditionalGeneration",
    "Qwen3ASRRealtimeGeneration": "it takes audio and no images",
}


def known_to_vllm() -> set[str]:
    """The models of Qwen that vLLM knows to read more than text."""
    spec = find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")
    # Read, not imported: importing vLLM takes half a minute.
    registry = Path(str(spec.origin)).parent / "model_executor" / "models" / "registry.py"
    for node in ast.parse(registry.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MULTIMODAL_MODELS":
            names = {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
            return {name for name in names if name.startswith("Qwen")}
    raise AssertionError("vLLM lists its models in another way")


def test_vllm_runs_each_family_and_no_model_of_qwen_that_is_not_listed():
    trained = {family.model_class.__name__ for family in FAMILIES.values()}
    out = {name for model_type, name in known_to_transformers().items() if model_type in UNSUPPORTED}
    known = known_to_vllm()
    assert trained <= known
    assert known <= trained | out | set(OTHERS_OF_VLLM)
    assert set(OTHERS_OF_VLLM) <= known


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_built_in_family_can_be_loaded_as_a_plug_in(model_type):
    """`model.family: {fn: mmrl.policy.families.qwen3_5:make_family}` describes what `qwen3_5` describes."""
    loaded = load_family(f"mmrl.policy.families.{model_type}:make_family", Path(), {})
    built_in = FAMILIES[model_type]
    for field in set(built_in.__dataclass_fields__) - {"source"}:
        assert getattr(loaded, field) == getattr(built_in, field)


def test_a_family_from_a_plug_in_computes_what_the_built_in_one_does(make_tiny, tmp_path):
    """Recurrent layers and experts: the same rollouts, log-probs and gradients."""
    tiny = make_tiny("qwen3_5_moe")
    tiny.save(tmp_path)
    results = []
    for fn in (None, "mmrl.policy.families.qwen3_5_moe:make_family"):
        family = {"fn": fn} if fn else None
        options = ModelConfig(path=str(tmp_path), dtype="float32", family=family, min_pixels=2304, max_pixels=2304)
        bundle = load_pretrained(options)
        assert (bundle.family.source is None) == (fn is None)
        processor = make_prompt_processor(bundle.family, bundle.processor)
        own = replace(tiny, policy=PolicyModel(bundle.model, family=bundle.family), processor=processor)
        experiences = own.experiences(tiny.samples[:3], 2)
        logprobs_N = own.policy.compute_logprobs(own.collate(experiences)).logprobs_N
        logprobs_N.sum().backward()
        tokens = [experience.rollout.segments[0].token_ids for experience in experiences]
        gradients = [parameter.grad for parameter in own.policy.trainable.values() if parameter.grad is not None]
        results.append((tokens, [logprobs_N, *gradients]))
    (tokens, tensors), (same_tokens, same_tensors) = results
    assert tokens == same_tokens
    assert all(map(torch.equal, tensors, same_tensors))
    assert len(tensors) == len(same_tensors) > 20
