"""examples/model_family.py: a tiny model is loaded, frozen, encoded for, sampled from and scored through it."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from fork_server import run_forked
from processors import make_prompt_processor

from mmrl.config.schema import LoraConfig, ModelConfig
from mmrl.policy.families import FAMILIES, load_family
from mmrl.policy.lora import create_adapter
from mmrl.policy.policy import PolicyModel
from mmrl.policy.pretrained import load_pretrained
from mmrl.types import CoordinateSystem, Size, UserError

EXAMPLES = Path(__file__).parents[3] / "examples"
SQUARE = "./model_family.py:square_qwen"


@pytest.fixture(scope="module")
def folder(make_tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny().save(folder)
    return folder


def load(folder, **family):
    options = ModelConfig(path=str(folder), dtype="float32", family={"fn": SQUARE, "args": {"cells": 3}, **family})
    return load_pretrained(options, EXAMPLES)


def test_rollouts_of_its_model_are_sampled_and_learned_from(make_tiny, folder):
    bundle = load(folder)
    policy = PolicyModel(bundle.model, family=bundle.family, freeze=("vision", "projector"))
    processor = make_prompt_processor(bundle.family, bundle.processor)
    tiny = replace(make_tiny(), policy=policy, processor=processor)
    prompt = processor.build(tiny.samples[0])
    assert prompt.resize_maps[0].resized == Size(48, 48)
    assert prompt.coordinate_system is CoordinateSystem.NORM_1000
    banned = policy.banned_ids(processor.tokenizer)
    batch = tiny.collate(tiny.experiences(tiny.samples[:1], 2, banned_token_ids=banned))
    policy.compute_logprobs(batch).logprobs_N.sum().backward()
    learned = {
        bundle.family.component_of(name)
        for name, parameter in bundle.model.named_parameters()
        if parameter.grad is not None and parameter.grad.any()
    }
    assert learned == {"language"}


def test_its_names_decide_components_and_lora_targets(folder):
    bundle = load(folder)
    renamed = replace(bundle.family, projector_name="patch_embed", lora_layers={"language.mlp": r".*\.down_proj"})
    names = [name for name, _ in bundle.model.named_parameters()]
    projector = {name for name in names if renamed.component_of(name) == "projector"}
    assert projector == {name for name in names if "visual.patch_embed" in name}
    create_adapter(bundle.model, LoraConfig(targets=("language.mlp",)), 0, renamed)
    trained = [name for name, parameter in bundle.model.named_parameters() if parameter.requires_grad]
    assert trained and all("down_proj" in name for name in trained)


@pytest.mark.slow
def test_another_process_unpickles_it_by_its_function(tmp_path):
    """Worker processes encode prompts, and have not imported the file."""
    family = load_family(SQUARE, EXAMPLES, {"cells": 3})
    (tmp_path / "family").write_bytes(pickle.dumps(family))
    done = run_forked("-c", "import pickle; print(pickle.load(open('family', 'rb')).cells)", cwd=tmp_path)
    assert done.stdout == "3\n", done.stderr
    assert pickle.loads(pickle.dumps(FAMILIES["qwen2_vl"])) == FAMILIES["qwen2_vl"]


WRONG_METHOD = """from dataclasses import fields
from mmrl.policy.families import FAMILIES, ModelFamily
class Mine(ModelFamily):
    def resized_image_size(self, size): ...
def make():
    qwen = FAMILIES["qwen2_vl"]
    return Mine(**{field.name: getattr(qwen, field.name) for field in fields(ModelFamily)})
"""


@pytest.mark.parametrize(
    ("source", "args", "words"),
    [
        ((EXAMPLES / "model_family.py").read_text().replace("square_qwen", "make"), {"cell": 3}, "no option 'cell'"),
        ("def make():\n    return 'qwen'\n", {}, "model.family './mine.py:make' returned str 'qwen'; it must return a"),
        (WRONG_METHOD, {}, r"mine.py:4: .* is called as resized_image_size\(.*but: "),
    ],
    ids=["option", "type", "method"],
)
def test_a_family_that_cannot_be_used_is_refused_as_it_is_loaded(tmp_path, source, args, words):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(UserError, match=words):
        load_family("./mine.py:make", tmp_path, args)


def test_a_family_needs_the_path_of_a_model():
    with pytest.raises(ValueError, match="`family` describes a model that `path` names"):
        ModelConfig(from_scratch={}, family={"fn": SQUARE})
