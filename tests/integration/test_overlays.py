"""Overlays: each is headed and explains itself over several recipes; DAPO and ProRL train three of them."""

import json
from collections import Counter
from pathlib import Path

import published_rows
import pytest
from harness import Command, succeed
from json_lines import read_json_lines
from published_rows import make_small
from serving import reply, served

from mmrl.config import explain, load_config
from mmrl.config.recipes import iter_recipes, read_header
from mmrl.config.schema import RlStage
from mmrl.types import UserError

OVERLAYS = [path.stem for path in iter_recipes("overlays")]
RECIPES = ("vlm_r1_rec", "r1_v", "seed_bench_r1")  # boxes, counts, videos
STEPS = 3
ALL = {"april", "balanced", "co_reward", "dapo", "limr", "one_example", "par", "prorl", "think_prune", "tina"}
TINY = {
    "prorl": {"reference.plateau": {"window": 1, "min_improvement": 1.0}},
    "april": {"rollout_steps.0.partial_rollout_tokens": 4},
    "one_example": {"repeat_samples_to": 2},
}
"""Overrides by overlay that make the recipe's last stage small."""


def test_all_overlays_are_there_and_headed():
    assert set(OVERLAYS) == ALL
    for path in iter_recipes("overlays"):
        header = read_header(path)
        assert "(arXiv:" in header.title and header.summary and set(header.sections) == {"Numbers", "Departures"}
        assert header.sections["Departures"]


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("recipe", [*RECIPES, "vl_rethinker", "openvlthinker"])
def test_an_overlay_explains_itself_over_a_recipe(recipe, overlay):
    plain, loaded = load_config(recipe), load_config(recipe, [f"overlays=[{overlay}]"])
    assert loaded.config.run.name == f"{recipe}-{overlay}"
    assert loaded.config.data == plain.config.data
    stages = [stage for stage in loaded.config.stages if isinstance(stage, RlStage)]
    assert explain(loaded).count("\n  R_i = ") == len(stages)
    written = [origin for origin in loaded.origins.values() if f"overlays/{overlay}.yaml" in origin]
    assert written


@pytest.mark.parametrize("overlay", ["april", "co_reward"])
@pytest.mark.parametrize("recipe", ["deepeyes", "frame_thinker", "vl_rethinker", "vrag_rl", "sccm", "kimi_k1_5"])
def test_an_overlay_keeps_the_rollout_steps_of_a_recipe(recipe, overlay):
    plain, loaded = load_config(recipe).config, load_config(recipe, [f"overlays=[{overlay}]"]).config
    for stage, changed in zip(plain.stages, loaded.stages, strict=True):
        if isinstance(stage, RlStage) and isinstance(changed, RlStage):
            own = changed.rollout_steps[: len(stage.rollout_steps)]
            assert own[1:] == stage.rollout_steps[1:]
            if overlay == "co_reward":
                assert own == stage.rollout_steps and changed.rollout_steps[-1].kind == "custom"
            else:
                assert own[0].kind == "generate" and own[0].partial_rollout_tokens == 1024


def test_an_adapter_over_a_stage_that_freezes_by_itself_is_refused():
    with pytest.raises(UserError, match=r"tina.yaml:\d+: stages: stage 'cold' has `freeze`, and `model.lora` freezes"):
        load_config("rl_with_cold_start", ["overlays=[tina]"])


def test_dapo_and_tina_lie_over_each_other():
    config = load_config("r1_v", ["overlays=[dapo, tina]"]).config
    (stage,) = config.stages
    assert isinstance(stage, RlStage)
    assert config.run.name == "r1_v-dapo-tina"
    assert (stage.loss.clip_high, stage.loss.kl.coef, stage.optimizer.decay_steps) == (0.28, 0.0, 1500)
    assert config.model.lora is not None and config.model.lora.alpha == 128
    assert [term.name for term in config.rewards.terms] == ["accuracy", "format", "overlong"]


def train(recipe: str, overlay: str, folder: Path, model: Path, in_process: Command, *words: str) -> list[dict]:
    config = load_config(recipe, [f"overlays=[{overlay}]"]).config
    overrides = make_small(config)
    for key, value in TINY.get(overlay, {}).items():
        overrides[f"stages.{config.stages[-1].name}.{key}"] = value
    data = published_rows.write_data(recipe, folder / "data")
    settings = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    places = ("--model", model, "--data", data, "--run-dir", folder / "run", "--overlay", overlay)
    succeed(in_process("train", recipe, *places, *settings, *words, "--steps", STEPS))
    assert (folder / "run/model/model.safetensors").exists()
    told = read_json_lines(folder / "run/metrics.jsonl")
    stages = Counter(record["stage"] for record in told if "learner/lr" in record)
    assert stages == {stage.name: STEPS for stage in config.training_stages}
    return told


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("overlay", ["dapo", "prorl"])
def test_dapo_and_prorl_train_three_recipes(recipe, overlay, tmp_path, tiny_model, in_process):
    told = train(recipe, overlay, tmp_path, tiny_model, in_process)
    steps = [record for record in told if "learner/lr" in record]
    if overlay == "dapo":
        assert all("reward/term/overlong" in record for record in steps)
    else:
        # No reward rises by 1, so the reference is reset as soon as two rewards can be compared.
        assert [record["learner/reference_resets"] for record in steps] == [0.0, 1.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("overlay", ["april", "balanced", "limr", "one_example", "think_prune", "tina"])
def test_the_other_overlays_train(overlay, tmp_path, tiny_model, in_process):
    words = ["stages.limr_best.range=[0.0, null]"] if overlay == "limr" else []
    train("r1_v", overlay, tmp_path, tiny_model, in_process, *words)


@pytest.mark.slow
def test_co_reward_trains_where_rows_have_another_wording(tmp_path, tiny_model, in_process, monkeypatch):
    plain = published_rows.load_rows("r1_v")
    files = {}
    for path, table in plain["files"].items():
        files[path] = [{**row, "reworded": f"In other words: {row['problem']}"} for row in table]
    monkeypatch.setattr(published_rows, "load_rows", lambda name: {**plain, "files": files})
    told = train("r1_v", "co_reward", tmp_path, tiny_model, in_process)
    assert all("reworded/no_majority" in record for record in told if "learner/lr" in record)


@pytest.mark.slow
def test_par_trains_on_a_reward_model(tmp_path, tiny_model, in_process):
    with served(lambda handler, body: reply(handler, {"score": 1.0})) as (url, _):
        told = train("r1_v", "par", tmp_path, tiny_model, in_process, f"rewards.terms.par.args.scorer.url={url}")
    assert all("reward/term/par" in record for record in told if "learner/lr" in record)
