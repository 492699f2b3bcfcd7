"""Presets of algorithms, replay and rethinking: settings that a name stands for, which a config may override."""

import json
from pathlib import Path
from typing import get_args

import pytest
from config_samples import SMALL, refused, write
from pydantic import ValidationError

from mmrl.config import load_config
from mmrl.config.explain import explain
from mmrl.config.export import dump_yaml
from mmrl.config.load import flatten_settings
from mmrl.config.schema import ReplayConfig, RethinkConfig, RlStage, presets


def loaded(tmp_path, *overrides):
    return load_config(write(tmp_path, SMALL), overrides)


def test_each_name_has_its_settings():
    assert get_args(presets.AlgorithmName) == tuple(presets.ALGORITHM_PRESETS)
    assert get_args(presets.RethinkPreset) == tuple(presets.RETHINK_PRESETS)
    assert get_args(presets.ReplayPreset) == tuple(presets.REPLAY_PRESETS)


@pytest.mark.parametrize("name", presets.ALGORITHM_PRESETS)
def test_an_algorithm_sets_its_bundle_with_origins_and_nothing_else(tmp_path, name):
    plain = flatten_settings(loaded(tmp_path).config.stages[1].model_dump(mode="json"))
    result = loaded(tmp_path, f"stages.rl.algorithm={name}")
    ours = flatten_settings(result.config.stages[1].model_dump(mode="json"))
    # Settings for replay are for stages that have it: no algorithm switches it on.
    bundle = {part: settings for part, settings in presets.ALGORITHM_PRESETS[name].items() if part != "replay"}
    bundle = flatten_settings(bundle) if bundle else {}
    assert {key: ours[key] for key in bundle} == bundle
    assert {key for key in ours if ours[key] != plain[key]} <= {*bundle, "algorithm"}
    origins = {key.removeprefix("stages.1."): origin for key, origin in result.origins.items() if "stages.1" in key}
    assert {key for key, origin in origins.items() if origin == f"algorithm {name}"} == bundle.keys()
    assert load_config(write(tmp_path, dump_yaml(result.config), "again.yaml")).config == result.config


def test_settings_of_a_stage_override_its_algorithm(tmp_path):
    write(tmp_path, SMALL.replace("name: rl", "name: rl\n    algorithm: gspo\n    loss: {clip_low: 0.1}"), "base.yaml")
    above = write(tmp_path, "extends: base.yaml\n")
    loss = load_config(above, ["stages.rl.loss.clip_high=0.2"]).config.stages[1].loss
    assert (loss.importance_ratio_level, loss.aggregation) == ("sequence", "sequence")
    assert (loss.clip_low, loss.clip_high) == (0.1, 0.2)
    loss = load_config(above, ["stages.rl.algorithm=cispo"]).config.stages[1].loss
    assert (loss.importance_ratio_level, loss.policy_loss) == ("token", "cispo")
    assert (loss.clip_low, loss.clip_high) == (0.1, 4.0)


def test_settings_of_a_file_that_an_algorithm_of_the_command_line_does_not_change_are_named(tmp_path):
    text = SMALL.replace("name: rl", "name: rl\n    algorithm: dapo\n    loss: {clip_high: 0.3, aggregation: token}")
    file = write(tmp_path, text, "mine.yaml")
    assert load_config(file).warnings == ()
    assert load_config(file, ["stages.rl.algorithm=grpo"]).warnings == ()
    (warning,) = load_config(file, ["stages.rl.algorithm=cispo"]).warnings
    assert (
        "mine.yaml:17: stages.1.loss.clip_high: stays 0.3, since a file sets it; `algorithm: cispo` has 4.0." in warning
    )
    words = ["stages.rl.algorithm=cispo", "stages.rl.loss.clip_high=3.0"]
    assert load_config(file, words).warnings == ()


def test_gspo_has_a_setting_for_replay_and_switches_none_on(tmp_path):
    cases = {"{}": "recomputed", "{preset: code}": "recomputed", "{old_logprobs: recorded}": "recorded"}
    for replay, expected in cases.items():
        stage = loaded(tmp_path, "stages.rl.algorithm=gspo", f"stages.rl.replay={replay}").config.stages[1]
        assert (stage.loss.old_logprobs, stage.replay.old_logprobs) == ("recomputed", expected)
    assert loaded(tmp_path, "stages.rl.algorithm=gspo").config.stages[1].replay is None
    assert loaded(tmp_path, "stages.rl.algorithm=gspo", "stages.rl.replay=null").config.stages[1].replay is None
    again = loaded(tmp_path, "stages.rl.algorithm=gspo", "stages.rl.replay={}").config
    assert load_config(write(tmp_path, dump_yaml(again), "again.yaml")).config == again
    with pytest.raises(ValidationError, match="algorithm 'gspo' stands for replay.old_logprobs too"):
        RlStage(
            kind="rl", name="rl", steps=1, algorithm="gspo", loss=presets.ALGORITHM_PRESETS["gspo"]["loss"], replay={}
        )


NARROW = "loss={importance_ratio_level: sequence, clip_low: 3e-4, clip_high: 4e-4}"
CARRY = "dynamic_sampling={ranges: [{term: right}], max_rounds: 2, extra: carry}"
PARTIAL = "rollout_steps=[{kind: generate, partial_rollout_tokens: 8}]"
OVERSAMPLED = "rollout_steps=[{kind: generate, partial_rollout_tokens: 8, oversampling: 2}]"


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["algorithm=gspo"], []),
        (["algorithm=gspo", "replay={}"], []),
        (["algorithm=gspo", "loss.old_logprobs=recorded"], ["loss.old_logprobs"]),
        (["algorithm=gspo", "replay={old_logprobs: recorded}"], ["replay.old_logprobs"]),
        (["algorithm=gspo", CARRY], ["dynamic_sampling.extra"]),
        (["algorithm=gspo", "async_rollouts=true"], ["async_rollouts"]),
        (["algorithm=gspo", PARTIAL], ["rollout_steps.0.partial_rollout_tokens"]),
        (["algorithm=gspo", OVERSAMPLED], ["rollout_steps.0.oversampling", "rollout_steps.0.partial_rollout_tokens"]),
        (["algorithm=gspo", OVERSAMPLED, "loss.rollout_correction.method=tis"], ["rollout_steps.0.oversampling"]),
        (["algorithm=gspo", "async_rollouts=true", "loss.rollout_correction.method=tis"], []),
        (["algorithm=gspo", CARRY, "loss.rollout_correction.method=tis"], ["dynamic_sampling.extra"]),
        ([NARROW], ["loss.old_logprobs"]),
        ([NARROW, "replay={}"], ["loss.old_logprobs", "replay.old_logprobs"]),
        ([NARROW, "loss.importance_ratio_level=token"], []),
        ([NARROW, "loss.clip_low=0.01", "loss.clip_high=0.01"], []),
        ([NARROW, "loss.clip_low=0.01"], ["loss.old_logprobs"]),
    ],
)
def test_clips_below_rounding_warn_where_engine_log_probs_are_used(tmp_path, overrides, keys):
    result = loaded(tmp_path, *(f"stages.rl.{override}" for override in overrides))
    assert [warning.split(": ")[1] for warning in result.warnings] == [f"stages.1.{key}" for key in keys]
    text = explain(result)
    for warning in result.warnings:
        assert "rounding" in warning and f"WARNING: {warning}\n" in text


def test_a_warning_names_the_file_and_the_line(tmp_path):
    loss = "name: rl\n    loss:\n      importance_ratio_level: sequence\n      clip_low: 3e-4\n      clip_high: 4e-4\n"
    path = write(tmp_path, SMALL.replace("name: rl\n", loss))
    [warning] = load_config(path).warnings
    line = path.read_text().split("loss:")[0].count("\n") + 1
    assert warning.startswith(f"{path}:{line}: stages.1.loss.old_logprobs: ")
    path = write(tmp_path, SMALL.replace("name: rl\n", loss + "      old_logprobs: recorded\n"))
    [warning] = load_config(path).warnings
    assert warning.startswith(f"{path}:{line + 4}: stages.1.loss.old_logprobs: ")


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        (RlStage, {"kind": "rl", "name": "rl", "steps": 1, "algorithm": "dr_grpo"}, "grpo' stands for advantage.scale"),
        (RethinkConfig, {"kind": "rethink", "correct": ("a",), "preset": "paper"}, "'paper' stands for cut_answer"),
        (ReplayConfig, {"preset": "paper"}, "'paper' stands for capacity too"),
    ],
)
def test_a_section_made_in_code_must_spell_out_its_preset(model, settings, said):
    with pytest.raises(ValidationError, match=said):
        model(**settings)


def test_settings_of_a_rethinking_step_override_its_preset(tmp_path):
    steps = "[{kind: generate}, {kind: rethink, correct: [exact], preset: paper, fraction: 0.5}]"
    result = loaded(tmp_path, f"stages.rl.rollout_steps={steps}", "stages.rl.sampling.max_new_tokens=2048")
    step = result.config.stages[1].rollout_steps[1]
    expected = {**presets.RETHINK_PRESETS["paper"], "fraction": 0.5}
    assert {key: value for key, value in step.model_dump().items() if key in expected and key != "triggers"} == {
        key: value for key, value in expected.items() if key != "triggers"
    }
    assert [trigger.only for trigger in step.triggers] == ["any", "any", "correct", "incorrect"]
    assert result.origins["stages.1.rollout_steps.1.cut_answer_fraction"] == "preset paper"
    assert result.origins["stages.1.rollout_steps.1.fraction"] == "command line"
    assert load_config(write(tmp_path, dump_yaml(result.config), "again.yaml")).config == result.config


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ("{combine: min, terms: [{fn: a:b}]}", "rewards.combine 'min' does not"),
        ("{terms: [{fn: a:b, schedule: {points: [[0, 1.0], [9, 0.5]]}}]}", "a:b has a schedule, which"),
        ("{terms: [{fn: a:b, transform: {threshold: 0.5}}]}", "a:b has `requires` or a transform, which"),
    ],
)
def test_advantages_per_term_need_a_weighted_sum(tmp_path, rewards, said):
    gdpo = ("stages.rl.algorithm=gdpo", f"rewards={rewards}")
    assert said in refused(write(tmp_path, SMALL), *gdpo)
    assert loaded(tmp_path, gdpo[1]).config.rewards.terms[0].fn == "a:b"


@pytest.mark.parametrize("name", presets.REPLAY_PRESETS)
def test_a_preset_of_replay_is_in_place_with_its_origin_and_may_be_overridden(tmp_path, name):
    result = loaded(tmp_path, f"stages.rl.replay.preset={name}", "stages.rl.replay.priority_exponent=0.5")
    replay = result.config.stages[1].replay.model_dump()
    expected = {**ReplayConfig().model_dump(), "preset": name, **presets.REPLAY_PRESETS[name], "priority_exponent": 0.5}
    assert replay == expected
    origins = {key.rpartition(".")[2] for key, origin in result.origins.items() if origin == f"preset {name}"}
    assert origins == presets.REPLAY_PRESETS[name].keys()
    assert load_config(write(tmp_path, dump_yaml(result.config), "again.yaml")).config == result.config


@pytest.mark.parametrize(("warmup", "decay_steps", "count"), [(19, None, 0), (20, None, 1), (20, 30, 0)])
def test_a_warm_up_that_lasts_for_the_whole_stage_is_warned_of(tmp_path, warmup, decay_steps, count):
    optimizer = {"lr_schedule": "cosine", "warmup_steps": warmup, "decay_steps": decay_steps}
    path = write(tmp_path, SMALL)
    loaded = load_config(path, [f"stages.rl.optimizer={json.dumps(optimizer)}"])
    assert len(loaded.warnings) == count
    for warning in loaded.warnings:
        assert warning.startswith("command line: stages.1.optimizer.warmup_steps: the warm-up lasts for all 20 steps")


def test_validation_samples_that_no_stage_uses_are_warned_of(tmp_path):
    path = write(tmp_path, SMALL)
    overrides = ["data.validation=[{fn: a:b}]", "data.train.0.validation_share=0.1"]
    sources, share = load_config(path, overrides).warnings
    assert sources.startswith("command line: data.validation: no stage has `validation`")
    assert share.startswith("command line: data.train.0.validation_share: no stage has `validation`")
    assert load_config(path, [*overrides, "stages.rl.validation={}"]).warnings == ()


QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
LATER = [f"stages.rl.algorithm={name}" for name in presets.ALGORITHM_PRESETS]
LATER += ["overlays=dapo", "overlays=[april, dapo]", "overlays+=dapo", "stages.rl.replay={preset: paper}"]


@pytest.mark.parametrize("later", LATER)
def test_an_override_of_a_loaded_config_does_what_it_does_to_the_file(later):
    first = ["run.seed=3", "overlays=april"]
    expected = load_config(QUICKSTART, [*first, later])
    assert load_config(load_config(QUICKSTART, first), [later]) == expected
    assert load_config(load_config(load_config(QUICKSTART), first), [later]) == expected


def test_a_loaded_config_does_not_change_with_its_file(tmp_path):
    path = write(tmp_path, SMALL)
    before = load_config(path)
    path.write_text("run: {}")
    assert load_config(before, ["stages.rl.algorithm=gspo"]).config.stages[1].loss.clip_high == 4e-4
    assert load_config(before) == before
