"""examples/model_family.py: a tiny model that is loaded, frozen, encoded for and trained one step through it."""

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from samplers import hf_sampler

from mmrl.answer import ResponseFormat
from mmrl.config.schema import LoraConfig, LossConfig, MediaLimitsConfig, ModelConfig, OptimizerConfig, VideoConfig
from mmrl.learner.learner import LearnerConfig, PolicyLearner
from mmrl.learner.optimizer_torch import TorchOptimizer
from mmrl.media.cache import MediaCache
from mmrl.policy.encoder import PromptEncoder
from mmrl.policy.families import FAMILIES, load_family
from mmrl.policy.lora import create_adapter
from mmrl.policy.policy import Policy, banned_ids
from mmrl.policy.pretrained import load_pretrained
from mmrl.policy.processor import PromptProcessor
from mmrl.types import CoordinateSystem, Experience, MediaPolicy, SamplingParams, Size, UserError

EXAMPLES = Path(__file__).parents[2] / "examples"
SQUARE = "./model_family.py:square_qwen"


@pytest.fixture(scope="module")
def folder(make_tiny, tmp_path_factory):
    tiny, folder = make_tiny(), tmp_path_factory.mktemp("model")
    tiny.policy.model.save_pretrained(folder)
    tiny.processor.hf_processor.save_pretrained(folder)
    return folder


def load(folder, **family):
    options = ModelConfig(path=str(folder), dtype="float32", family={"fn": SQUARE, "args": {"cells": 3}, **family})
    return load_pretrained(options, EXAMPLES)


def test_a_model_trains_one_step_through_it(make_tiny, folder):
    bundle = load(folder)
    policy = Policy(bundle.model, family=bundle.family, freeze=("vision", "projector"))
    encoder = PromptEncoder(
        bundle,
        ResponseFormat(),
        MediaCache(MediaPolicy(roots=(Path("/"),)), MediaLimitsConfig(), max_bytes=0),
        video=VideoConfig(),
        add_instruction=False,
        max_prompt_tokens=500,
    )
    processor = PromptProcessor(encoder)
    prompt = processor.build(make_tiny().samples[0])
    assert prompt.resize_maps[0].resized == Size(48, 48)
    assert prompt.coordinate_system is CoordinateSystem.NORM_1000
    banned = banned_ids(processor.tokenizer, len(processor.tokenizer), bundle.family)
    sampling_params = SamplingParams(max_new_tokens=4, banned_token_ids=banned)
    (group,) = hf_sampler(policy, processor, seed_parts=("test",)).generate([prompt], 2, sampling_params, step=0)
    config = LearnerConfig(
        loss=LossConfig(),
        optimizer=OptimizerConfig(lr=1e-3),
        total_steps=1,
        micro_batch_groups=1,
        micro_batch_tokens=10_000,
        epochs=1,
        shared_prefix=True,
        pad_id=processor.tokenizer.eos_token_id,
    )
    optimizer = TorchOptimizer(policy.trained_by_component, config.optimizer)
    before = {name: parameter.clone() for name, parameter in bundle.model.named_parameters()}
    experiences = [Experience(rollout=rollout, advantage=1.0 - 2 * i) for i, rollout in enumerate(group)]
    metrics = PolicyLearner(policy, processor, optimizer, config).step(experiences, step=0)
    assert metrics["learner/grad_norm/language"] > 0
    for name, parameter in bundle.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (bundle.family.component_of(name) != "language"), name


def test_it_names_components_and_lora_targets(folder):
    bundle = load(folder)
    renamed = replace(bundle.family, projector_name="patch_embed", lora_layers={"language.mlp": r".*\.down_proj"})
    names = [name for name, _ in bundle.model.named_parameters()]
    projector = {name for name in names if renamed.component_of(name) == "projector"}
    assert projector == {name for name in names if "visual.patch_embed" in name}
    create_adapter(bundle.model, LoraConfig(targets=("language.mlp",)), 0, renamed)
    trained = [name for name, parameter in bundle.model.named_parameters() if parameter.requires_grad]
    assert trained and all("down_proj" in name for name in trained)


def test_another_process_makes_it_again():
    """Worker processes encode prompts, and have not imported the file."""
    family = load_family(SQUARE, EXAMPLES, {"cells": 3})
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).cells)"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(family), capture_output=True, check=False)
    assert done.stdout.strip() == b"3", done.stderr
    assert pickle.loads(pickle.dumps(FAMILIES["qwen2_vl"])) == FAMILIES["qwen2_vl"]


def test_mistakes_are_named(folder, tmp_path):
    with pytest.raises(UserError, match="model family './model_family.py:square_qwen' has no option 'cell'"):
        load(folder, args={"cell": 3})
    (tmp_path / "mine.py").write_text("def make():\n    return 'qwen'\n")
    with pytest.raises(UserError, match=r"model.family './mine.py:make' returned str 'qwen'; it must return a"):
        load_family("./mine.py:make", tmp_path, {})
    with pytest.raises(ValueError, match="`family` describes a model that `path` names"):
        ModelConfig(from_scratch={}, family={"fn": SQUARE})


def test_a_family_whose_method_takes_other_arguments_is_refused_as_it_is_loaded(tmp_path):
    text = """from dataclasses import fields
from mmrl.policy.families import FAMILIES, ModelFamily
class Mine(ModelFamily):
    def resized_image_size(self, size): ...
def family():
    qwen = FAMILIES["qwen2_vl"]
    return Mine(**{field.name: getattr(qwen, field.name) for field in fields(ModelFamily)})
"""
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=r"mine.py:4: .* is called as resized_image_size\(.*but: "):
        load_family("./mine.py:family", tmp_path, {})
