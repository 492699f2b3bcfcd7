"""What a run leaves in RUN/model belongs to transformers: it loads there, speaks the same, and trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TINY, Command, counting, experiment, imitation, metrics, reinforcement, write
from PIL import Image
from safetensors.torch import load_model
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmrl.checkpoint import latest
from mmrl.cli import main
from mmrl.policy.families import FAMILIES

QUESTION = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Count the red shapes."}]}]


def short(run_dir: Path, **model: object) -> dict[str, Any]:
    """A run of two steps and one, on any model."""
    pixels = {"device": "cpu", "min_pixels": 1024, "max_pixels": 1024}
    return experiment(
        run_dir,
        model={"dtype": "float32", **pixels, **model},
        data={"train": [counting("train", 6)], "test": [counting("test", 3)]},
        stages=[imitation(steps=2), reinforcement(steps=1)],
    )


@pytest.fixture(scope="module", params=list(FAMILIES))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a trained tiny model, one for each family."""
    folder = tmp_path_factory.mktemp(request.param)
    config = short(folder / "run", scratch={**TINY, "family": request.param})
    assert main(["train", str(write(config, folder / "short.yaml"))]) == 0
    return folder / "run"


def test_transformers_loads_it_as_the_familys_class_with_the_checkpoints_weights(trained: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(trained / "model")
    family = FAMILIES[model.config.model_type]
    assert type(model) is family.model_class
    twin = family.model_class(model.config)
    checkpoint = latest(trained / "checkpoints", pytest.fail)
    assert checkpoint is not None
    load_model(twin, checkpoint / "model.safetensors")
    inputs = asked(trained)
    with torch.no_grad():
        exported, kept = model.eval()(**inputs).logits, twin.eval()(**inputs).logits
    assert exported.std() > 0
    assert torch.equal(exported, kept)


def test_it_generates_with_its_own_generation_config(trained: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(trained / "model")
    processor = AutoProcessor.from_pretrained(trained / "model")
    eos = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == eos
    inputs = asked(trained)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=5, do_sample=False)
        first = model(**inputs).logits[0, -1].argmax()
    written = output[0, inputs["input_ids"].shape[1] :]
    assert 1 <= len(written) <= 5
    assert written[0] == first


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_trains_on_in_a_new_run(trained: Path, tmp_path: Path, here: Command, dtype: str) -> None:
    config = short(tmp_path / "on", path=str(trained / "model"), dtype=dtype)
    config["stages"] = [imitation(steps=1), reinforcement(steps=1)]
    done = here("train", write(config, tmp_path / "on.yaml"))
    assert done.code == 0, done.errors
    assert not done.errors  # no progress bars, no warnings
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "on" / "model")
    assert model.dtype == getattr(torch, dtype)
    (first, *_) = metrics(tmp_path / "on")
    (before, *_) = metrics(trained)
    assert first["learner/loss"] < before["learner/loss"]  # it begins where the other ended
    assert weights_moved(trained / "model", tmp_path / "on" / "model")


def asked(run_dir: Path) -> dict[str, torch.Tensor]:
    """A question about a picture of the run, as the exported processor puts it."""
    processor = AutoProcessor.from_pretrained(run_dir / "model")
    with Image.open(min((run_dir / "data").rglob("*.png"))) as picture:
        text = processor.apply_chat_template(QUESTION, add_generation_prompt=True)
        return dict(processor(text=[text], images=[picture.convert("RGB")], return_tensors="pt"))


def weights_moved(before: Path, after: Path) -> bool:
    """Whether any weight differs by more than the rounding to bfloat16 explains."""
    old, new = (AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32) for path in (before, after))
    pairs = zip(old.parameters(), new.parameters(), strict=True)
    return any(not torch.allclose(a, b, rtol=2**-7, atol=0.0) for a, b in pairs)
