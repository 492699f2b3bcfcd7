"""examples/internvl.py: a family that is not Qwen's encodes, samples, learns, is exported and evaluated."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from factories import image_ref, make_sample
from harness import Command, metrics, refuse, succeed
from PIL import Image
from processors import make_prompt_processor, pad_prompts
from rounding import LOGPROBS
from transformers import AutoModelForImageTextToText, AutoProcessor, InternVLForConditionalGeneration

from mmrl.config.schema import ModelConfig, VideoConfig
from mmrl.log.console import Console
from mmrl.policy.families import load_family
from mmrl.policy.policy import PolicyModel
from mmrl.policy.pretrained import load_pretrained
from mmrl.rollout.shared_engine import SharedEngine
from mmrl.types import UserError

EXAMPLES = Path(__file__).parents[2] / "examples"
FAMILY = {"fn": "./internvl.py:internvl"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a tiny new model."""
    folder = tmp_path_factory.mktemp("internvl") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES.parent / "tools")
        from tiny_internvl import write_tiny_model

        write_tiny_model(folder)
    return folder


def train(in_process: Command, folder: Path, run: Path, *overrides: str):
    return in_process("train", EXAMPLES / "internvl.yaml", f"model.path={folder}", f"run.dir={run}", *overrides)


@pytest.mark.slow
def test_internvl_trains_and_its_export_is_loaded_and_evaluated(folder, tmp_path, in_process):
    succeed(train(in_process, folder, tmp_path / "run"))
    last = metrics(tmp_path / "run")[-2]  # the last record is the reward on the test set
    assert min(last[f"learner/grad_norm/{part}"] for part in ("vision", "projector", "language")) > 0
    assert last["rollout/logprob_diff_mean"] < LOGPROBS
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "model")
    assert type(exported) is InternVLForConditionalGeneration
    assert AutoProcessor.from_pretrained(tmp_path / "run" / "model").image_processor.size == {"height": 32, "width": 32}
    succeed(in_process("eval", tmp_path / "run" / "model", "--benchmark", "run:test", "--out", tmp_path / "out"))
    (task,) = json.loads((tmp_path / "run" / "summary.json").read_text())["tasks"]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["rewards"] == {"count": task["after"]}


def test_a_frozen_tower_gets_no_gradient(folder, tmp_path, in_process):
    overrides = ("model.freeze=[vision,projector]", "stages.cold.steps=1", "stages.rl.steps=1")
    succeed(train(in_process, folder, tmp_path / "run", *overrides, "model.attn_implementation=eager"))
    (first, *_) = metrics(tmp_path / "run")
    assert first["learner/grad_norm/language"] > 0 == first["learner/grad_norm/vision"]


def test_a_prompt_is_what_transformers_makes_of_it(folder, clip, tmp_path):
    bundle = load_pretrained(ModelConfig(path=str(folder), dtype="float32", family=FAMILY), EXAMPLES)
    processor = make_prompt_processor(bundle.family, bundle.processor, video=VideoConfig())
    images = (Image.effect_noise((32, 32), 90), Image.radial_gradient("L").resize((32, 32)))
    parts, content = ["Compare"], [{"type": "text", "text": "Compare"}]
    for number, image in enumerate(images):
        file = tmp_path / f"{number}.png"
        image.convert("RGB").save(file)
        parts.append(image_ref(file))
        content.append({"type": "image", "image": image.convert("RGB")})
    sample = make_sample(parts=tuple(parts))
    prompt = processor.build(sample)
    question = [{"role": "user", "content": content}]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    options["processor_kwargs"] = {"crop_to_patches": False}
    theirs = bundle.processor.apply_chat_template(question, **options)
    assert list(prompt.token_ids) == theirs["input_ids"][0].tolist()
    with torch.no_grad():
        expected = bundle.model.eval()(**theirs).logits[0, -1]
    batch = pad_prompts([prompt], processor, pad_id=0)
    arguments = bundle.family.model_arguments(batch.position_ids_3BP, batch.token_types_BP, batch.media)
    assert torch.equal(arguments["pixel_values"], theirs["pixel_values"])
    _, logits = PolicyModel(bundle.model, family=bundle.family).prefill(batch)
    torch.testing.assert_close(logits[0], expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match=r"sample s: .*clip.mp4: the model \(internvl\) takes no videos"):
        processor.build(replace(sample, parts=("What moves?", clip)))


def test_vllm_is_refused(folder, tmp_path, in_process):
    done = train(in_process, folder, tmp_path / "run", "rollout.engine=vllm")
    refuse(done, "model.family: internvl prepares images in its own form")


def test_several_processes_are_refused():
    config = SimpleNamespace(rollout=SimpleNamespace(engine="hf", engine_name="hf"))
    policy = SimpleNamespace(family=load_family("./internvl.py:internvl", EXAMPLES, {}))
    options = {"adapter": None, "work_dir": None, "ranks": SimpleNamespace(size=2), "console": Console()}
    with pytest.raises(UserError, match="it runs in one process with rollout.engine: hf, not with .* hf in 2"):
        SharedEngine(config, policy, None, **options)
