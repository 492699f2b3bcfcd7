"""The list of families against what the installed transformers and vLLM know of Qwen, and each family as a plug-in."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from learning import make_experiences, make_learner
from transformers.models.auto import modeling_auto
from videos import SMALL

from mmrl.config.schema import MediaLimitsConfig, ModelConfig
from mmrl.media.cache import MediaCache
from mmrl.policy.encoder import PromptEncoder
from mmrl.policy.families import FAMILIES, load_family
from mmrl.policy.policy import Policy
from mmrl.policy.pretrained import load_pretrained
from mmrl.policy.processor import PromptProcessor
from mmrl.types import MediaPolicy
from mmrl.utils.model_files import UNSUPPORTED


def known_to_transformers() -> dict[str, str]:
    """The class of each model type of Qwen that reads text beside images, videos or sound."""
    known = {
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    return {model_type: name for model_type, name in known.items() if model_type.startswith("qwen")}


def test_every_model_type_of_qwen_is_trained_or_named_with_a_reason():
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


def test_vllm_runs_every_family_and_what_else_it_runs_of_qwen_is_named():
    trained = {family.model_class.__name__ for family in FAMILIES.values()}
    out = {name for model_type, name in known_to_transformers().items() if model_type in UNSUPPORTED}
    known = known_to_vllm()
    assert trained <= known
    assert known <= trained | out | set(OTHERS_OF_VLLM)
    assert set(OTHERS_OF_VLLM) <= known


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_built_in_family_is_a_plug_in_like_any_other(model_type):
    """`model.family: {fn: mmrl.policy.families.qwen3_5:make_family}` describes what `qwen3_5` describes."""
    loaded = load_family(f"mmrl.policy.families.{model_type}:make_family", Path(), {})
    built_in = FAMILIES[model_type]
    for field in set(built_in.__dataclass_fields__) - {"source"}:
        assert getattr(loaded, field) == getattr(built_in, field)


def test_a_family_behind_the_plug_in_trains_what_the_built_in_one_trains(make_tiny, tmp_path):
    """Recurrent layers and experts, sampled from and learned from: the same rollouts, metrics and weights."""
    tiny = make_tiny("qwen3_5_moe")
    tiny.policy.model.save_pretrained(tmp_path)
    tiny.processor.hf_processor.save_pretrained(tmp_path)
    results = []
    for family in (None, {"fn": "mmrl.policy.families.qwen3_5_moe:make_family"}):
        bundle = load_pretrained(
            ModelConfig(path=str(tmp_path), dtype="float32", family=family, min_pixels=2304, max_pixels=2304)
        )
        assert (bundle.family.source is None) == (family is None)
        known = tiny.processor.encoder
        cache = MediaCache(MediaPolicy(roots=(Path("/"),)), MediaLimitsConfig(), max_bytes=0)
        encoder = PromptEncoder(
            bundle, known.response_format, cache, video=SMALL, add_instruction=False, max_prompt_tokens=500
        )
        own = replace(tiny, policy=Policy(bundle.model, family=bundle.family), processor=PromptProcessor(encoder))
        experiences = make_experiences(own, advantages=(1.0, -1.0))
        metrics = make_learner(own).step(experiences, step=0)
        tokens = [experience.rollout.segments[0].token_ids for experience in experiences]
        results.append((tokens, metrics, bundle.model.state_dict()))
    (tokens, metrics, weights), (same_tokens, same_metrics, same_weights) = results
    assert (tokens, metrics) == (same_tokens, same_metrics)
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
