"""The recipes of published systems: each loads, explains itself, is in the table of docs/recipes.md, and does a step of
every stage with a tiny model, on rows with the columns that it reads.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import published_rows
import pytest
from harness import TINY, Command
from PIL import Image
from serving import judging, served
from videos import SMALL

from mmrl.checkpoint import export_hf_folder
from mmrl.config import Config, explain, load_config
from mmrl.config.schema import FromScratchConfig, RlStage, SampleStage, SftStage
from mmrl.policy.tiny_models import make_model, make_processor, train_tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "configs" / "recipes"
HARDWARE = ("grounding_3b", "qwen2_5_vl_", "qwen3_")
PUBLISHED = sorted(path.stem for path in RECIPES.glob("*.yaml") if not path.stem.startswith(HARDWARE))
MOST_LINES = 65
SHORT = 8  # tokens
NUM_STEPS = 2  # of each stage


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL in a folder, as a recipe's own model would be."""
    folder, spec = tmp_path_factory.mktemp("model"), FromScratchConfig.model_validate(TINY)
    tokenizer = train_tokenizer(["<think>One and one.</think><answer>2</answer>"], spec.language.vocab_size)
    export_hf_folder(folder, make_model(spec, tokenizer, seed=0), make_processor(spec, tokenizer, (1024, 1024)))
    return folder


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    """The address of a judge that finds every answer wrong: a run asks it once before its first step."""
    with served(judging(lambda material: {"score": 0})) as (url, _):
        yield url


def test_every_recipe_has_rows():
    assert published_rows.names() == PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_recipe_is_short_explained_and_says_where_its_numbers_are_from(name: str) -> None:
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# ") and "Departures" in text and "Numbers" in text
    assert len(text.splitlines()) <= MOST_LINES
    loaded = load_config(str(RECIPES / f"{name}.yaml"))
    assert loaded.config.run.name == name
    num_rl_stages = sum(isinstance(stage, RlStage) for stage in loaded.config.stages)
    assert explain(loaded).count("\n  R_i = ") == num_rl_stages


def test_the_table_of_recipes_lists_every_recipe():
    table = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    linked = re.findall(r"\.\./configs/recipes/(\w+)\.yaml", table)
    assert sorted(set(linked)) == PUBLISHED


def test_the_skeleton_in_the_docs_runs(tmp_path: Path, here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").partition("## Write one")[2]
    blocks = re.findall(r"```(yaml|console)\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(blocks[0][1])
    Path("images").mkdir()
    told, asked = [], []
    for number in range(4):
        Image.new("RGB", (64, 64), (60 * number, 90, 90)).save(f"images/{number}.png")
        asked.append({"image": f"{number}.png", "problem": f"How many {number}?", "answer": number})
        reply = f"<think>One by one.</think><answer>{number}</answer>"
        turns = [{"from": "human", "value": f"<image>Count {number}."}, {"from": "gpt", "value": reply}]
        told.append({"id": number, "image": f"{number}.png", "conversations": turns})
    Path("cold.json").write_text(json.dumps(told))
    Path("rl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))

    commands = re.findall(r"^\$ mmrl (.*?)(?: +#.*)?$", blocks[1][1], re.MULTILINE)
    (tiny,) = re.findall(r"--run-dir try (.*)$", blocks[2][1], re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["explain", "data", "data", "train"]
    for command in commands:
        done = here(*command.split(), *tiny.split())
        assert done.code == 0, done
    assert Path("sample.png").exists()
    assert Path("try/model/model.safetensors").exists()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_recipe_runs_with_a_tiny_model(
    name: str, tmp_path: Path, model: Path, judge: str, here: Command
) -> None:
    config = load_config(name).config
    overrides = small(config)
    for index, term in enumerate(config.rewards.terms):
        if "judge" in term.args:
            overrides[f"rewards.terms.{index}.args.judge.url"] = judge
    words = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    data = published_rows.write_data(name, tmp_path / "data")
    folders = ("--model", model, "--data", data, "--run-dir", tmp_path / "run")
    done = here("train", name, *folders, *words, "--steps", NUM_STEPS)
    assert done.code == 0, done.errors
    told = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    trained = [stage.name for stage in config.training_stages]
    supervised = {stage.name for stage in config.stages if isinstance(stage, SftStage)}
    stages = Counter(record["stage"] for record in told if "learner/lr" in record)
    assert stages == dict.fromkeys(trained, NUM_STEPS)
    assert all(record["learner/grad_norm"] > 0 for record in told if record["stage"] in supervised)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def small(config: Config) -> dict[str, Any]:
    """What is made small, and nothing else: model, media, and how much a step does."""
    values: dict[str, Any] = {
        "model.dtype": "float32",
        "model.device": "cpu",
        "model.min_pixels": 1024,
        "model.max_pixels": 1024,
        "model.video": {**SMALL.model_dump(), "max_frames": 4},
        "run.cpu_threads": 1,
    }
    for index, source in enumerate(config.data.train):
        if "size" in source.args:
            values[f"data.train.{index}.args.size"] = 8  # what a recipe makes
    for stage in config.stages:
        at = f"stages.{stage.name}"
        if isinstance(stage, RlStage | SampleStage):
            values |= {f"{at}.prompts_per_step": 2, f"{at}.sampling.max_new_tokens": SHORT}
        if isinstance(stage, RlStage):
            values |= {
                f"{at}.group_size": min(2, stage.group_size),
                f"{at}.num_mini_batches": min(2, stage.num_mini_batches),
            }
            values |= {f"{at}.dynamic_sampling.max_rounds": 2} if stage.dynamic_sampling else {}
        if isinstance(stage, RlStage | SftStage):
            values |= small_steps(at, stage.rollout_steps)
        if isinstance(stage, SftStage):
            values[f"{at}.batch_size"] = 2
        if stage.kind == "sample":
            values[f"{at}.group_size"] = 5
        if stage.kind == "select" and stage.output == "responses":
            values[f"{at}.threshold"] = 0.0  # a tiny model is never right
    return values | small_steps("evaluation", config.evaluation.rollout_steps)


def small_steps(owner: str, steps: Sequence[Any]) -> dict[str, Any]:
    values = {}
    for index, step in enumerate(steps):
        for key, number in SMALLER.get(step.kind, {}).items():
            values[f"{owner}.rollout_steps.{index}.{key}"] = number
    return values


SMALLER = {
    "rethink": {"min_free_tokens": 0, "min_new_tokens": 0, "max_new_tokens": SHORT},
    "tools": {"max_total_tokens": 2048},  # those of demonstrations, too
    "probe": {"rollouts_per_prompt": 1},
    "environment": {"turns": 2, "max_tokens": 1024},
}
"""Of the steps of a program."""
