"""`algorithm: NAME` puts a bundle of settings in place, which a stage may override, and explain shows as formulas."""

import re

import pytest
from config_samples import SMALL, refused, write
from pydantic import ValidationError

from mmrl.config import load_config
from mmrl.config.explain import explain
from mmrl.config.export import dump_yaml
from mmrl.config.load import flatten_settings
from mmrl.config.schema import ReplayConfig, RlStage
from mmrl.config.schema.presets import ALGORITHM_PRESETS, REPLAY_PRESETS


def loaded(tmp_path, *overrides):
    return load_config(write(tmp_path, SMALL), overrides)


@pytest.mark.parametrize("name", ALGORITHM_PRESETS)
def test_an_algorithm_sets_its_bundle_with_origins_and_nothing_else(tmp_path, name):
    plain = flatten_settings(loaded(tmp_path).config.stages[1].model_dump(mode="json"))
    result = loaded(tmp_path, f"stages.rl.algorithm={name}")
    ours = flatten_settings(result.config.stages[1].model_dump(mode="json"))
    # Settings for replay are for stages that have it: no algorithm switches it on.
    bundle = {part: settings for part, settings in ALGORITHM_PRESETS[name].items() if part != "replay"}
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
    assert (loss.importance_ratio_level, loss.clip_low, loss.clip_high, loss.aggregation) == (
        "sequence",
        0.1,
        0.2,
        "sequence",
    )
    loss = load_config(above, ["stages.rl.algorithm=cispo"]).config.stages[1].loss
    assert (loss.importance_ratio_level, loss.policy_loss, loss.clip_low, loss.clip_high) == (
        "token",
        "cispo",
        0.1,
        4.0,
    )


def test_gspo_has_a_setting_for_replay_and_switches_none_on(tmp_path):
    for replay, expected in (
        ("{}", "recomputed"),
        ("{preset: code}", "recomputed"),
        ("{old_logprobs: recorded}", "recorded"),
    ):
        stage = loaded(tmp_path, "stages.rl.algorithm=gspo", f"stages.rl.replay={replay}").config.stages[1]
        assert (stage.loss.old_logprobs, stage.replay.old_logprobs) == ("recomputed", expected)
    assert loaded(tmp_path, "stages.rl.algorithm=gspo").config.stages[1].replay is None
    assert loaded(tmp_path, "stages.rl.algorithm=gspo", "stages.rl.replay=null").config.stages[1].replay is None
    again = loaded(tmp_path, "stages.rl.algorithm=gspo", "stages.rl.replay={}").config
    assert load_config(write(tmp_path, dump_yaml(again), "again.yaml")).config == again
    with pytest.raises(ValidationError, match="algorithm 'gspo' stands for replay.old_logprobs too"):
        RlStage(kind="rl", name="rl", steps=1, algorithm="gspo", loss=ALGORITHM_PRESETS["gspo"]["loss"], replay={})


NARROW = "loss={importance_ratio_level: sequence, clip_low: 3e-4, clip_high: 4e-4}"
CARRY = "dynamic_sampling={ranges: [{term: right}], max_rounds: 2, extra: carry}"
PARTIAL = "rollout_steps=[{kind: generate, partial_rollout_tokens: 8}]"


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
    narrow = (
        "name: rl\n    loss:\n      importance_ratio_level: sequence\n      clip_low: 3e-4\n      clip_high: 4e-4\n"
    )
    path = write(tmp_path, SMALL.replace("name: rl\n", narrow))
    [warning] = load_config(path).warnings
    line = path.read_text().split("loss:")[0].count("\n") + 1
    assert warning.startswith(f"{path}:{line}: stages.1.loss.old_logprobs: ")
    path = write(tmp_path, SMALL.replace("name: rl\n", narrow + "      old_logprobs: recorded\n"))
    [warning] = load_config(path).warnings
    assert warning.startswith(f"{path}:{line + 4}: stages.1.loss.old_logprobs: ")


def test_a_stage_made_in_code_must_spell_out_its_algorithm():
    with pytest.raises(ValidationError, match="algorithm 'dr_grpo' stands for advantage.scale too"):
        RlStage(kind="rl", name="rl", steps=1, algorithm="dr_grpo")
    whole = {"advantage": {"scale": "none"}, "loss": {"aggregation": "fixed"}}
    assert RlStage(kind="rl", name="rl", steps=1, algorithm="dr_grpo", **whole).loss.aggregation == "fixed"


FORMULAS = {
    "grpo": ["L = -(1/N) Σ_i Σ_t min(r_t A_i, clip(r_t, 0.8, 1.2) A_i)\n", "/ (std(R) + 0.0001), over the 8 rollouts"],
    "grpo_published": ["L = -(1/S) Σ_i (1/n_i) Σ_t min(r_t A_i"],
    "dr_grpo": ["L = -(1/(512 S)) Σ_i Σ_t min(r_t A_i", "A_i = R_i - mean(R), over the 8 rollouts"],
    "dapo": ["clip(r_t, 0.8, 1.28) A_i)", "N counts every sampled token of the whole step, truncated ones left out"],
    "gspo": [
        "(1/n_i) Σ_t min(r_i A_i, clip(r_i, 0.9997, 1.0004) A_i)",
        "r_i = geometric mean over t of π(y_t) / π_old",
    ],
    "cispo": ["Σ_t clip(r_t, 0, 5) A_i log π(y_t)", "no gradient flows through the clipped ratio"],
    "rloo": ["L = -(1/S) Σ_i Σ_t min(r_t A_i", "A_i = R_i - mean(R but R_i)", "π_old computed by the learner"],
    "reinforce_plus_plus_baseline": [
        "A_i = R_i - mean(R)",
        "then A_i becomes (A_i - mean(A)) / (std(A) + 0.0001) over all rollouts",
    ],
    "stable_reinforce": ["is kept within ±6.908 before that", "becomes 0 where it is more than 3 std(A) from mean(A)"],
    "gdpo": ["for each reward term by itself, its value as R; then A_i is their sum by weight"],
}


@pytest.mark.parametrize("name", ALGORITHM_PRESETS)
def test_explain_writes_the_formula_of_every_bundle(tmp_path, name):
    words = explain(loaded(tmp_path, f"stages.rl.algorithm={name}"))
    assert f"Stage 2 of 2, rl: {name}\n" in words
    for formula in FORMULAS[name]:
        assert formula in words


@pytest.mark.parametrize(
    ("override", "formulas"),
    [
        ("loss.dual_clip=3", ["where A < 0 the ratio counts 3 at most"]),
        (
            "loss={old_logprobs: recomputed, rollout_correction: {method: tis}}",
            ["Σ_t w_t min(", "w_t = π_old(y_t) / π_sampler(y_t), at most 2"],
        ),
        (
            "loss={old_logprobs: recomputed, rollout_correction: {method: mask, level: sequence, high: 5}}",
            ["w_t = product over the response of π_old(y_t) / π_sampler(y_t), 0 where it is outside [0.5, 5]"],
        ),
        (
            "loss.kl={coef: 0.1, estimator: k2, log_ratio_clip: 10}",
            [" + 0.1 · KL", "d²/2, d = log π_ref(y_t)", " within ±10"],
        ),
        (
            "loss.kl={coef: 0.1, estimator: k1, apply_to: reward, schedule: linear, final_frac: 0.5}",
            [
                "min(r_t A_t, ",
                "A_t = A_i - 0.1 · the sum over t and later tokens of -d",
                "its weight falls to 0.05 (linear)",
            ],
        ),
        ("loss.entropy={coef: 0.01, schedule: cosine}", [" - 0.01 · H", "its weight falls to 0 (cosine)"]),
        (
            "loss.sft_loss={coef: 0.05}",
            [" + 0.05 · NLL", "over the policy's tokens after a trigger, in responses that then"],
        ),
        (
            "advantage={difficulty_weight: {term: acc, max_weight: 1.8}}",
            ["4 · 1.8 · p (1 - p), p the group's mean of acc"],
        ),
        ("advantage={baseline: batch_mean, scale: batch_std}", ["(R_i - mean(R of the step)) / (std(R of the step)"]),
    ],
)
def test_explain_writes_every_option(tmp_path, override, formulas):
    words = explain(loaded(tmp_path, f"stages.rl.{override}"))
    for formula in formulas:
        assert formula in words, words


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("{}", "π_ref is the policy at the stage's start, frozen"),
        ("{update: ema, ema_decay: 0.9}", "π_ref is a running average of π: 0.9 of it stays every step"),
        (
            "{update: reset, update_every: 200, reset_optimizer: true}",
            "π_ref is π itself, copied every 200 steps, the optimizer's moments cleared",
        ),
    ],
)
def test_explain_says_how_the_reference_is_updated(tmp_path, reference, said):
    words = explain(loaded(tmp_path, "stages.rl.loss.kl.coef=0.1", f"stages.rl.reference={reference}"))
    assert re.search(re.escape(said) + r"$", words, re.MULTILINE)


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


@pytest.mark.parametrize("name", REPLAY_PRESETS)
def test_a_preset_of_replay_is_in_place_with_its_origin_and_may_be_overridden(tmp_path, name):
    result = loaded(tmp_path, f"stages.rl.replay.preset={name}", "stages.rl.replay.priority_exponent=0.5")
    replay = result.config.stages[1].replay.model_dump()
    expected = {**ReplayConfig().model_dump(), "preset": name, **REPLAY_PRESETS[name], "priority_exponent": 0.5}
    assert replay == expected
    origins = {key.rpartition(".")[2] for key, origin in result.origins.items() if origin == f"preset {name}"}
    assert origins == REPLAY_PRESETS[name].keys()
    assert load_config(write(tmp_path, dump_yaml(result.config), "again.yaml")).config == result.config


def test_replay_made_in_code_must_spell_out_its_preset():
    with pytest.raises(ValidationError, match="preset 'paper' stands for capacity too"):
        ReplayConfig(preset="paper")


@pytest.mark.parametrize(
    ("settings_", "said"),
    [
        (
            "replay={}",
            ["Selective sample replay: rollouts without advantage are replaced", "by default: preset default, "],
        ),
        (
            "replay={preset: code}",
            [
                "target_fraction 0.5: Replayed rollouts fill",
                "max_staleness null: ",
                "resample_fresh true: Draw fresh rollouts",
            ],
        ),
        (
            "replay={priority_exponent: 0.5}",
            ["priority_exponent 0.5: A rollout is drawn in proportion to |A| to this power"],
        ),
        (
            "replay={old_logprobs: recomputed}",
            ["old_logprobs recomputed: Denominator of a replayed"],
        ),
        (
            "dynamic_sampling={ranges: [{term: x, low: 0.1, high: 0.9}]}",
            ["ranges [{term: x, low: 0.1, high: 0.9, require_mixed: true}]: Conditions"],
        ),
        (
            "dynamic_sampling={ranges: [{term: x}], max_rounds: 3, extra: carry}",
            [
                "max_rounds 3: ",
                "extra carry: ",
            ],
        ),
        (
            "dynamic_sampling={max_truncated_frac: 0.25}",
            ["max_truncated_frac 0.25: A group is left out"],
        ),
    ],
)
def test_explain_says_which_tokens_are_learned(tmp_path, settings_, said):
    text = explain(loaded(tmp_path, f"stages.rl.{settings_}"))
    assert all(line in text for line in said), text
