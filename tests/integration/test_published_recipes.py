"""The recipes of published systems: each loads, explains itself, is in the table of docs/recipes.md, and does a step of
every stage with a tiny model, on rows with the columns that it reads.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import published_rows
import pytest
from harness import Command
from PIL import Image
from published_rows import make_small
from serving import judging, reply, served

from mmrl.config import Config, explain, load_config
from mmrl.config.recipes import LABELS, read_header
from mmrl.config.schema import RlStage

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "configs" / "recipes"
HARDWARE = ("grounding_3b", "qwen2_5_vl_", "qwen3_")
PUBLISHED = sorted(path.stem for path in RECIPES.glob("*.yaml") if not path.stem.startswith(HARDWARE))
MOST_LINES = 65
NUM_STEPS = 2  # of each stage
RANDOM_TERM = """\
from zlib import crc32

from mmrl import reward


@reward(name="random")
def random(response, sample):
    return crc32(response.text.encode()) % 97 / 97
"""
"""A reward by which the responses of an untrained model differ, so that every RL stage has a gradient."""


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    """The address of a judge that finds every answer wrong: a run asks it once before its first step."""
    with served(judging(lambda material: {"score": 0})) as (url, _):
        yield url


@pytest.fixture(scope="module")
def scorer() -> Iterator[str]:
    """The address of a reward model whose scores differ from text to text."""
    with served(lambda handler, body: reply(handler, {"score": len(body["response"]) % 5 - 2.0})) as (url, _):
        yield url


def let_random_term_decide(config: Config) -> dict[str, object]:
    """Return overrides where a term that a tiny model always fails would leave no gradient."""
    overrides: dict[str, object] = {"rewards.combine": "sum"}
    for stage in config.stages:
        if isinstance(stage, RlStage) and stage.dynamic_sampling:
            band = [{"term": "random", "low": 0.01, "high": 0.99}]
            overrides[f"stages.{stage.name}.dynamic_sampling.ranges"] = band
        if isinstance(stage, RlStage) and stage.advantage.difficulty_weight:
            overrides[f"stages.{stage.name}.advantage.difficulty_weight.term"] = "random"
    return overrides


def test_every_recipe_has_rows():
    assert published_rows.names() == PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_recipe_is_short_explained_and_says_where_its_numbers_are_from(name: str) -> None:
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    header = read_header(RECIPES / f"{name}.yaml")
    assert header.title and header.summary and tuple(header.sections) == LABELS
    assert len(text.splitlines()) <= MOST_LINES
    loaded = load_config(str(RECIPES / f"{name}.yaml"))
    assert loaded.config.run.name == name
    words = " ".join(file.read_text(encoding="utf-8").partition("\nrun:")[0] for file in loaded.files)
    assert [file for file in loaded.data_files if file.split("/")[0] not in words] == []
    num_rl_stages = sum(isinstance(stage, RlStage) for stage in loaded.config.stages)
    assert explain(loaded).count("\n  R_i = ") == num_rl_stages


def test_the_table_of_recipes_lists_every_recipe():
    table = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    linked = re.findall(r"\.\./configs/recipes/(\w+)\.yaml", table)
    assert set(linked) == {path.stem for path in RECIPES.glob("*.yaml")}
    assert len(linked) == len(set(linked))


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
        said = f"<think>One by one.</think><answer>{number}</answer>"
        turns = [{"from": "human", "value": f"<image>Count {number}."}, {"from": "gpt", "value": said}]
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
    name: str, tmp_path: Path, tiny_model: Path, judge: str, scorer: str, here: Command
) -> None:
    config = load_config(name).config
    overrides = make_small(config)
    for index, term in enumerate(config.rewards.terms):
        if "judge" in term.args:
            overrides[f"rewards.terms.{index}.args.judge.url"] = judge
        if "scorer" in term.args:
            overrides[f"rewards.terms.{index}.args.scorer.url"] = scorer
    overrides |= let_random_term_decide(config)
    words = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    data = published_rows.write_data(name, tmp_path / "data")
    (tmp_path / "random_term.py").write_text(RANDOM_TERM)
    term = {"fn": "./random_term.py:random", "weight": 0.25}
    extended = {"extends": name, "rewards": {"terms": {"random": term}}}
    (tmp_path / "random.yaml").write_text(json.dumps(extended))
    folders = ("--model", tiny_model, "--data", data, "--run-dir", tmp_path / "run")
    done = here("train", tmp_path / "random.yaml", *folders, *words, "--steps", NUM_STEPS)
    assert done.code == 0, done.errors
    told = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    trained = [stage.name for stage in config.training_stages]
    stages = Counter(record["stage"] for record in told if "learner/lr" in record)
    assert stages == dict.fromkeys(trained, NUM_STEPS)
    norms = [(record["stage"], record["learner/grad_norm"]) for record in told if "learner/grad_norm" in record]
    assert len(norms) == NUM_STEPS * len(trained) and all(norm > 0 for _, norm in norms), norms
    validated = {record["stage"] for record in told if "validation/mean" in record}
    assert validated == {stage.name for stage in config.training_stages if stage.validation}
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
