"""The model that a run exports: transformers loads it, it computes the same, and a new run trains it further."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TINY, counting, experiment, metrics, refuse, rl_stage, run_mmrl, sft_stage, succeed, write
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file, load_model
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmrl.checkpoint import find_latest
from mmrl.cli import main
from mmrl.policy.families import FAMILIES

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Count the red shapes."}]}]


def short(run_dir: Path, **model: object) -> dict[str, Any]:
    """A run of two steps and one, on any model."""
    pixels = {"device": "cpu", "min_pixels": 1024, "max_pixels": 1024}
    return experiment(
        run_dir,
        model={"dtype": "float32", **pixels, **model},
        data={"train": [counting("train", 6)], "test": [counting("test", 3)]},
        stages=[sft_stage(steps=2), rl_stage(steps=1)],
        checkpoints={"every": 1, "keep_last": 9},
    )


@pytest.fixture(scope="module", params=list(FAMILIES))
def trained(request, tmp_path_factory) -> Path:
    """The run directory of a trained tiny model, one for each family."""
    folder = tmp_path_factory.mktemp(request.param)
    # Two layers: where some are recurrent, the second is not.
    language = {**TINY["language"], "num_layers": 2}
    config = short(folder / "run", from_scratch={**TINY, "family": request.param, "language": language})
    assert main(["train", str(write(config, folder / "short.yaml"))]) == 0
    return folder / "run"


def test_transformers_loads_it_as_the_familys_class_with_the_checkpoints_weights(trained):
    model = load(trained / "model")
    family = FAMILIES[model.config.model_type]
    assert type(model) is family.model_class
    from_checkpoint = family.model_class(model.config)
    checkpoint = find_latest(trained / "checkpoints", pytest.fail)
    assert checkpoint is not None
    load_model(from_checkpoint, checkpoint / "model.safetensors")
    inputs = image_inputs(trained)
    with torch.no_grad():
        exported, expected = model.eval()(**inputs).logits, from_checkpoint.eval()(**inputs).logits
    assert exported.std() > 0
    assert torch.equal(exported, expected)


def test_an_exported_model_generates_and_ends_with_the_tokenizer_of_training(trained):
    model, tokenizer = load(trained / "model"), AutoProcessor.from_pretrained(trained / "model").tokenizer
    generation = model.generation_config
    assert (generation.eos_token_id, generation.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert tokenizer.eos_token == "<|im_end|>"
    assert (trained / "model" / "chat_template.jinja").is_file()
    inputs = image_inputs(trained)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        first = model(**inputs).logits[0, -1].argmax()
    assert 1 <= len(output) <= 5
    assert output[0] == first
    # A tokenizer from scratch keeps the space after punctuation.
    for name in ("model", "processor"):
        split = AutoProcessor.from_pretrained(trained / name).tokenizer.backend_tokenizer.pre_tokenizer
        assert [piece for piece, _ in split.pre_tokenize_str("a, b")] == ["a", ",Ġ", "b"]


def test_an_evaluation_gives_it_the_rewards_of_training(trained, tmp_path, in_process):
    succeed(in_process("eval", trained / "model", "--benchmark", "run:test", "--out", tmp_path))
    (task,) = json.loads((trained / "summary.json").read_text())["tasks"]
    assert json.loads((tmp_path / "report.json").read_text())["rewards"] == {"count": task["after"]}


def test_an_exported_model_trains_in_a_new_run(trained, tmp_path, in_process):
    """In bfloat16, though it is in float32: test_lora.py and test_family_runs.py keep the type."""
    config = short(tmp_path / "on", path=str(trained / "model"), dtype="bfloat16")
    config["stages"] = [sft_stage(steps=1), rl_stage(steps=1)]
    done = succeed(in_process("train", write(config, tmp_path / "on.yaml")))
    assert not done.errors  # no progress bars, no warnings
    model = load(tmp_path / "on" / "model")
    assert model.dtype == torch.bfloat16
    (first, *_) = metrics(tmp_path / "on")
    (before, *_) = metrics(trained)
    assert first["learner/loss"] < before["learner/loss"]  # it begins where the other ended
    assert weights_differ(trained / "model", tmp_path / "on" / "model")


@pytest.fixture
def moved(trained, tmp_path) -> Path:
    """A copy of the run without the model it ended with and without its data: an export needs neither."""
    run = Path(shutil.copytree(trained, tmp_path / "moved"))
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "data")
    return run


def test_an_exported_checkpoint_equals_the_model_of_the_run(trained, moved, tmp_path):
    done = succeed(run_mmrl("export", moved, "--out", tmp_path / "out"))
    assert not done.errors
    (line,) = done.output.splitlines()  # DeepSpeed, imported on the way, has nothing to say
    assert line.endswith(f"checkpoints/02-000000 -> {tmp_path / 'out'}")
    assert files(tmp_path / "out") == files(trained / "model")


def test_an_earlier_checkpoint_has_other_weights_and_fewer_stages(trained, moved, tmp_path, in_process):
    for name in ("00-000001", "01-000000"):  # after a step of the first stage, and before the first step of the second
        succeed(in_process("export", moved, "--checkpoint", name, "--out", tmp_path / name))
        text = (tmp_path / name / "README.md").read_text()
        assert f": imitation (cold). Checkpoint {name}." in text and "## Held-out reward" not in text
    assert weights_differ(tmp_path / "00-000001", trained / "model")
    assert ": imitation (cold), then grpo (rl). Checkpoint 02-000000." in (trained / "model" / "README.md").read_text()


def test_the_model_card_has_rewards_data_config_and_metrics(trained):
    text = (trained / "model" / "README.md").read_text()
    summary, manifest = (json.loads((trained / name).read_text()) for name in ("summary.json", "manifest.json"))
    (task,) = summary["tasks"]
    assert f"| count | 3 | {task['before']:.3f} [" in text
    assert f"- train: `{manifest['data']['train']}`" in text
    assert f"torch {torch.__version__}" in text
    config = re.search(r"```yaml\n(.*)```", text, re.DOTALL)
    assert config and config[1] == (trained / "config.yaml").read_text()
    last = re.search(r"```json\n(.*?)\n```", text, re.DOTALL)
    assert last and json.loads(last[1]) == [record for record in metrics(trained) if "learner/lr" in record][-1]
    assert ModelCard(text).data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text",
        "tags": ["mmrl", "reinforcement-learning"],
    }


def test_a_float32_output_layer_changes_log_probs_and_not_the_export(tmp_path):
    dtypes, settings, records = [], [], []
    for enabled in (False, True):
        config = short(tmp_path / str(enabled), from_scratch=TINY, dtype="bfloat16", float32_output_layer=enabled)
        config["rollout"] = {"logprob_check": {"every": 1}}
        assert main(["train", str(write(config, tmp_path / f"{enabled}.yaml"))]) == 0
        model = tmp_path / str(enabled) / "model"
        dtypes.append({name: tensor.dtype for name, tensor in load_file(model / "model.safetensors").items()})
        settings.append({path.name: path.read_text() for path in model.glob("*config.json")})
        records.append(metrics(tmp_path / str(enabled)))
    assert dtypes[0] == dtypes[1] and set(dtypes[0].values()) == {torch.bfloat16}
    assert settings[0] == settings[1]
    rounded, exact = records
    assert [record.keys() for record in rounded] == [record.keys() for record in exact]
    assert rounded[0]["learner/loss"] != exact[0]["learner/loss"] == pytest.approx(rounded[0]["learner/loss"], rel=0.01)
    checks = [record["logprob_check/diff_mean"] for record in exact if "logprob_check/diff_mean" in record]
    assert checks and max(checks) < 0.01


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{run}", "--out", "{run}"], "exists"),
        (["{parent}", "--out", "{out}"], "is not an mmrl run directory"),
        (["{run}", "--checkpoint", "01-000007", "--out", "{out}"], "no checkpoint '01-000007'; available: 0"),
        (["{run}", "--checkpoint", "best", "--out", "{out}"], "`best` needs checkpoints.best"),
        (["{run}", "--merge-lora", "--out", "{out}"], "trains no adapter"),
    ],
)
def test_an_impossible_export_is_refused(moved, tmp_path, in_process, arguments, words):
    places = {"run": moved, "parent": tmp_path, "out": tmp_path / "out"}
    refuse(in_process("export", *(argument.format(**places) for argument in arguments)), words)
    assert not (tmp_path / "out").exists()


def files(folder: Path) -> dict[str, bytes]:
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    # transformers adds how the tokenizer was loaded.
    tokenizer = json.loads(contents["tokenizer_config.json"])
    kept = {key: value for key, value in tokenizer.items() if key not in ("is_local", "local_files_only")}
    return {**contents, "tokenizer_config.json": json.dumps(kept).encode()}


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, **options)


def image_inputs(run_dir: Path) -> dict[str, torch.Tensor]:
    """A question about an image of the run, as the exported processor encodes it."""
    processor = AutoProcessor.from_pretrained(run_dir / "model")
    with Image.open(min((run_dir / "data").rglob("*.png"))) as image:
        text = processor.apply_chat_template(QUESTION, add_generation_prompt=True)
        return dict(processor(text=[text], images=[image.convert("RGB")], return_tensors="pt"))


def weights_differ(before: Path, after: Path) -> bool:
    """Return True if any weight differs by more than the rounding to bfloat16 explains."""
    old, new = (load(path, dtype=torch.float32) for path in (before, after))
    pairs = zip(old.parameters(), new.parameters(), strict=True)
    return any(not torch.allclose(a, b, rtol=2**-7, atol=0.0) for a, b in pairs)
