"""Recipes of systems that act: from demonstrations to a trained tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import TINY, Command, metrics, succeed
from PIL import Image
from ruamel.yaml import YAML
from serving import judging, served
from zoom_runs import check_all_occurred

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"
ROWS = Path(__file__).parents[1] / "data" / "recipe_rows"
MODEL = {**TINY, "language": {**TINY["language"], "vocab_size": 400}}
pytestmark = pytest.mark.slow


def train(in_process: Command, recipe: Path, stages: dict[str, str], overrides: dict[str, Any]) -> Path:
    """Train a recipe with a tiny model for two steps a stage; `stages` are kinds by name."""
    run_dir = recipe.parent / "run"
    overrides |= {"model.path": None, "model.from_scratch": MODEL, "model.min_pixels": 1024, "model.max_pixels": 3136}
    overrides |= {"run.cpu_threads": 1, "evaluation.max_new_tokens": 8}
    for name, kind in stages.items():
        overrides |= {f"stages.{name}.steps": 2, f"stages.{name}.prompts_per_step": 2}
        overrides[f"stages.{name}.optimizer.lr"] = 1e-2
        if kind != "sft":
            overrides |= {f"stages.{name}.group_size": 2, f"stages.{name}.num_mini_batches": 1}
            overrides[f"stages.{name}.sampling.max_new_tokens"] = 24
    words = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    succeed(in_process("train", recipe, *words, "--run-dir", run_dir))
    for name, kind in stages.items():
        steps = steps_of(run_dir, name)
        assert len(steps) == 2
        if kind == "sft":
            check_all_occurred(steps, "learner/grad_norm")
    return run_dir


def steps_of(run_dir: Path, stage: str) -> list[dict[str, Any]]:
    return [record for record in metrics(run_dir) if record["stage"] == stage and "learner/lr" in record]


def test_vrag_rl_searches_a_toy_corpus(tmp_path, in_process):
    """On the authors' rag_dataset.json as it is, with the recipe's own rewards and a judge that likes every answer."""
    pytest.importorskip("rank_bm25")
    text = (RECIPES / "vrag_rl.yaml").read_text().replace("max_tokens: 10240", "max_tokens: 1024")
    (tmp_path / "vrag_rl.yaml").write_text(text)
    rows = YAML(typ="safe", pure=True).load(ROWS / "vrag_rl.yaml")
    (tmp_path / "rag_dataset.json").write_text(json.dumps(rows["files"]["rag_dataset.json"]))
    pages = [json.dumps(page) + "\n" for page in rows["files"]["pages.jsonl"]]
    (tmp_path / "pages.jsonl").write_text("".join(pages))
    (tmp_path / "img").mkdir()
    for name in rows["media"]:
        Image.new("RGB", (120, 160), (200, 255, 255)).save(tmp_path / name)
    with served(judging(lambda material: {"score": 1})) as (url, _):
        overrides = {"data.dir": str(tmp_path), "rewards.terms.accuracy.args.judge.url": url}
        run_dir = train(in_process, tmp_path / "vrag_rl.yaml", {"cold": "sft", "rl": "rl"}, overrides)
    cold = steps_of(run_dir, "cold")
    assert [record["environment/media_shown"] for record in cold] == [2.0, 2.0]
    assert [record["environment/terminated"] for record in cold] == [2.0, 2.0]
    # Without a search, there is no reward, whatever the judge says.
    for record in steps_of(run_dir, "rl"):
        assert record["reward/term/format"] == 0.0
        assert record["reward/max"] == 0.0


def test_mobile_r1_imitates_acts_and_plays_tasks(tmp_path, in_process):
    recipe = tmp_path / "mobile_r1.yaml"
    text = (RECIPES / "mobile_r1.yaml").read_text().replace("size: 2000", "size: 6").replace("size: 1000", "size: 4")
    recipe.write_text(text)
    run_dir = train(in_process, recipe, {"imitation": "sft", "actions": "rl", "tasks": "rl"}, {})
    check_all_occurred(steps_of(run_dir, "imitation"), "environment/media_shown", "environment/terminated")
    check_all_occurred(steps_of(run_dir, "tasks"), "environment/turns")
