"""The recipes of published systems: each loads, explains itself, is in the table of docs/recipes.md, and does steps of
every stage with a tiny model, on rows with the columns that it reads, where right answers earn more than wrong ones.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import published_rows
import pytest
import recipe_answers
from harness import succeed
from json_lines import read_json_lines
from PIL import Image
from published_rows import make_small
from recipe_answers import NOTHING, make_wrong
from serving import judging, reply, served
from zoom_runs import check_all_occurred

from mmrl.config import Config, explain, load_config
from mmrl.config.recipes import LABELS, read_header
from mmrl.config.schema import RlStage, matches_conditions
from mmrl.data.context import make_dataset_context
from mmrl.policy.build import build_response_format
from mmrl.scoring.build import build_scorer
from mmrl.scoring.trial_responses import make_trial_response

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "configs" / "recipes"
HARDWARE = ("grounding_3b", "qwen2_5_vl_", "qwen3_")
PUBLISHED = sorted(path.stem for path in RECIPES.glob("*.yaml") if not path.stem.startswith(HARDWARE))
MOST_LINES = 59
NUM_STEPS = 2  # of each stage
NOT_BY_TARGET = {"clip_reward", "dress", "fgaif", "frame_thinker", "mobile_r1", "sgp", "stvg_o1"}
NOT_BY_TARGET |= {"time_master", "vrag_rl"}
"""Recipes whose rewards read more of a response than an answer of the target's type, or no target."""
ANSWERS = Path(recipe_answers.__file__)
EPISODES = {
    "vrag_rl": {"cold": ("media_shown", "terminated"), "rl": ("turns", "terminated")},
    "mobile_r1": {"imitation": ("media_shown", "terminated"), "tasks": ("turns",)},
}
"""Counts that must not be 0 in stages that act or imitate an expert, by recipe and stage."""


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    """The address of a judge that finds every answer wrong: a run asks it once before its first step."""
    with served(judging(lambda material: {"score": 0})) as (url, _):
        yield url


@pytest.fixture(scope="module")
def scorer() -> Iterator[str]:
    """The address of a reward model that likes every text but the wrong one."""

    def answer(handler, body):
        reply(handler, {"score": -2.0 if NOTHING in body["response"] else 2.0})

    with served(answer) as (url, _):
        yield url


def test_every_recipe_has_rows():
    assert published_rows.names() == PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_recipe_is_short_explained_and_says_where_its_numbers_are_from(name):
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


def test_the_skeleton_in_the_docs_runs(tmp_path, in_process, monkeypatch):
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
        succeed(in_process(*command.split(), *tiny.split()))
    assert Path("sample.png").exists()
    assert Path("try/model/model.safetensors").exists()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_recipe_learns_from_its_own_rewards(name, tmp_path, tiny_model, judge, scorer, in_process):
    config = load_config(name).config
    data = published_rows.write_data(name, tmp_path / "data")
    overrides = make_small(config) | services_here(config, judge, scorer)
    # A random tiny model is never right, so a test-only engine answers in its place, and nothing else is changed.
    overrides["rollout.engine"] = {"fn": f"{ANSWERS}:make_engine", "args": {"recipe": name, "data": str(data)}}
    overrides["logging.rollouts.every"] = 1
    words = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    folders = ("--model", tiny_model, "--data", data, "--run-dir", tmp_path / "run")
    succeed(in_process("train", name, *folders, *words, "--steps", NUM_STEPS))

    told = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    trained = [stage.name for stage in config.training_stages]
    stages = Counter(record["stage"] for record in told if "learner/lr" in record)
    assert stages == dict.fromkeys(trained, NUM_STEPS)
    for stage, happened in EPISODES.get(name, {}).items():
        steps = [record for record in told if record["stage"] == stage and "learner/lr" in record]
        check_all_occurred(steps, *(f"environment/{what}" for what in happened))
    norms = [(record["stage"], record["learner/grad_norm"]) for record in told if "learner/grad_norm" in record]
    assert len(norms) == NUM_STEPS * len(trained)
    assert all(norm > 0 and isfinite(norm) for _, norm in norms), norms
    validated = {record["stage"] for record in told if "validation/mean" in record}
    assert validated == {stage.name for stage in config.training_stages if stage.validation}
    for stage in config.stages:
        for step in range(1, NUM_STEPS + 1):
            if isinstance(stage, RlStage):
                check_that_right_answers_earn_more(tmp_path / "run" / "rollouts" / f"{stage.name}-{step:06d}.jsonl")
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "left_out" in published_rows.load_rows(name)])
def test_a_recipe_leaves_out_rows_that_cannot_be_scored(name, tmp_path, tiny_model, in_process):
    config = load_config(name).config
    data = published_rows.write_data(name, tmp_path / "data", with_left_out=True)
    overrides = make_small(config)
    overrides["rollout.engine"] = {"fn": f"{ANSWERS}:make_engine", "args": {"recipe": name, "data": str(data)}}
    words = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    folders = ("--model", tiny_model, "--data", data, "--run-dir", tmp_path / "run")
    done = succeed(in_process("train", name, *folders, *words, "--steps", NUM_STEPS))
    assert re.search(r"data\.train: 1 of \d+ samples cannot be used and are left out:", done.output)


def services_here(config: Config, judge: str, scorer: str) -> dict[str, Any]:
    """Return overrides by which the terms of a recipe ask the services of this test."""
    overrides = {}
    for index, term in enumerate(config.rewards.terms):
        if "judge" in term.args:
            overrides[f"rewards.terms.{index}.args.judge.url"] = judge
        if "scorer" in term.args:
            overrides[f"rewards.terms.{index}.args.scorer.url"] = scorer
    return overrides


def check_that_right_answers_earn_more(records: Path) -> None:
    """Check that the first of two siblings, which is right, has the higher reward and the higher advantage."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for line in read_json_lines(records):
        groups.setdefault(line["group"], []).append(line)
    siblings = list(groups.values())
    if all(len(group) == 1 for group in siblings):
        siblings = [[line for group in siblings for line in group]]  # the first prompt is answered right
    assert siblings
    for right, wrong, *_ in siblings:
        assert right["total"] > wrong["total"], (right["response"], wrong["response"], right["terms"], wrong["terms"])
        assert right["advantage"] > wrong["advantage"]


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in NOT_BY_TARGET])
def test_the_rewards_of_a_recipe_tell_the_target_of_each_row_from_another(name, tmp_path, judge, scorer):
    data = published_rows.write_data(name, tmp_path / "data")
    plain = load_config(name).config
    overrides = make_small(plain) | services_here(plain, judge, scorer) | {"data.dir": str(data)}
    config = load_config(name, [f"{key}={json.dumps(value)}" for key, value in overrides.items()]).config
    media_opener = make_dataset_context(config, tmp_path, tmp_path).media_opener
    rewards, response_format = build_scorer(config, tmp_path, media_opener), build_response_format(config)
    compared = set()
    for sample in published_rows.read_samples(config, tmp_path):
        if not any(isinstance(stage, RlStage) and matches_conditions(stage.when, sample) for stage in config.stages):
            continue
        pairs = []
        for target in (sample.target, make_wrong(sample.target)):
            text = response_format.build_example(target)
            pairs.append((make_trial_response(sample, text, response_format), sample))
        right, wrong = rewards.score(pairs, [None, None])
        assert right.total > wrong.total, (sample.task, pairs[0][0].text, pairs[1][0].text)
        compared.add(sample.task)
    rewards.close()
    assert compared
