"""Loading a config: values, origins, `extends`, overrides, `mmrl explain`, JSON schema."""

import json
import math
import re
import subprocess
import sys

import pytest
from config_samples import FULL, SMALL, full_tree, put, refused, write
from ruamel.yaml import YAML

from mmrl.config import cap_steps, config_json_schema, dump_yaml, explain, flatten_settings, load_config
from mmrl.types import UserError


def test_small_config_loads_with_defaults(tmp_path):
    config = load_config(write(tmp_path, SMALL)).config
    assert config.run.seed == 0
    assert [stage.kind for stage in config.stages] == ["sft", "rl"]
    assert config.stages[1].group_size == 8


def test_lists_become_tuples_and_integers_serve_as_numbers(tmp_path):
    config = load_config(
        write(tmp_path, SMALL), ["stages.rl.optimizer={lr: 1, betas: [0, 0.5]}", "model.freeze=[vision]"]
    ).config
    assert config.stages[1].optimizer.lr == 1.0
    assert config.stages[1].optimizer.betas == (0.0, 0.5)
    assert config.model.freeze == ("vision",)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("on", "on"),
        ("no", "no"),
        ("1e-6", 1e-6),
        ("1_000", 1000),
        ("010", 10),
        ("0o10", 8),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("=", "="),
        ("~", None),
        ("True", True),
        ("'1'", "1"),
        ("{a: [1, x]}", {"a": [1, "x"]}),
    ],
)
def test_yaml_1_2_values_are_read_as_written(tmp_path, written, meant):
    text = SMALL.replace("fn: mmrl_datasets.generators.scenes:count", f"fn: a:b\n      args: {{on: {written}}}")
    assert load_config(write(tmp_path, text)).config.data.train[0].args == {"on": meant}


def test_origins_name_file_line_command_line_and_default(tmp_path):
    path = write(tmp_path, SMALL)
    loaded = load_config(path, ["stages.rl.steps=3"])
    assert loaded.origins["run.name"] == f"{path}:1"
    assert loaded.origins["data.train.0.fn"] == f"{path}:6"
    assert loaded.origins["stages.0.steps"] == f"{path}:13"
    assert loaded.origins["stages.1.steps"] == "command line"
    assert loaded.origins["run.seed"] == "default"
    assert set(loaded.origins) == set(flatten_settings(loaded.config.model_dump(mode="json")))


def test_extends_merges_mappings_and_replaces_lists(tmp_path):
    write(tmp_path, SMALL + "evaluation: {batch_size: 3, temperature: 0.5}\n", "base.yaml")
    (tmp_path / "sub").mkdir()
    path = write(
        tmp_path / "sub",
        "extends: ../base.yaml\nevaluation: {batch_size: 4}\nstages: [{kind: sft, name: s, steps: 1}]\n",
    )
    loaded = load_config(path)
    assert (loaded.config.evaluation.batch_size, loaded.config.evaluation.temperature) == (4, 0.5)
    assert [stage.name for stage in loaded.config.stages] == ["s"]
    assert loaded.origins["evaluation.batch_size"] == f"{path}:2"
    assert loaded.origins["evaluation.temperature"] == f"{tmp_path}/sub/../base.yaml:17"
    assert loaded.files == (path, tmp_path / "sub" / "../base.yaml")


def test_extends_takes_a_list_later_ones_win_and_null_unsets(tmp_path):
    write(tmp_path, SMALL, "a.yaml")
    write(tmp_path, "run: {seed: 1}\nmodel: {dtype: float32}\n", "b.yaml")
    write(tmp_path, "run: {seed: 2}\n", "c0.yaml")
    path = write(tmp_path, "extends: [a.yaml, b.yaml, c0.yaml]\nmodel: {from_scratch: null, path: some/model}\n")
    config = load_config(path).config
    assert (config.run.seed, config.model.dtype, config.model.path, config.model.from_scratch) == (
        2,
        "float32",
        "some/model",
        None,
    )


def test_extends_refuses_cycles_and_says_who_asked(tmp_path):
    write(tmp_path, "extends: b.yaml\n", "a.yaml")
    write(tmp_path, "# two\nextends: a.yaml\n", "b.yaml")
    message = refused(tmp_path / "a.yaml")
    assert "b.yaml:2: extends: " in message and "a.yaml -> b.yaml -> a.yaml" in message
    assert "c.yaml:1: extends: " in refused(write(tmp_path, "extends: nope.yaml\n"))


def test_extends_cannot_multiply_without_bound(tmp_path):
    for i in range(20):
        write(tmp_path, f"extends: [{i + 1}.yaml, {i + 1}.yaml]\n", f"{i}.yaml")
    write(tmp_path, SMALL, "20.yaml")
    assert "100 at most" in refused(tmp_path / "0.yaml")


def test_overrides_reach_lists_stages_and_args(tmp_path):
    overrides = [
        "stages.1.optimizer.lr=1e-4",
        "stages.rl.loss.kl.coef=0.1",
        "data.train.0.args.a.b=[1, 2]",
        "run.name=x=y",
    ]
    path = write(tmp_path, SMALL)
    assert "file name" in refused(path, *overrides)
    config = load_config(path, overrides[:-1]).config
    assert config.stages[1].optimizer.lr == 1e-4
    assert config.stages[1].loss.kl.coef == 0.1
    assert config.data.train[0].args == {"a": {"b": [1, 2]}}
    assert load_config(path, ["run.seed=1", "run.seed=2"]).config.run.seed == 2


def test_cap_steps_lowers_longer_stages(tmp_path):
    path = write(tmp_path, SMALL)
    capped = cap_steps(load_config(path), 15)
    assert [stage.steps for stage in capped.config.stages] == [10, 15]
    assert capped.origins["stages.0.steps"] == f"{path}:13"
    assert capped.origins["stages.1.steps"] == "command line"
    with pytest.raises(UserError, match="at least 1"):
        cap_steps(capped, 0)


@pytest.mark.parametrize("text", [SMALL, FULL])
def test_dump_loads_back_equal(tmp_path, text):
    config = load_config(write(tmp_path, text)).config
    assert load_config(write(tmp_path, dump_yaml(config), "again.yaml")).config == config


TRICKY = [
    "on",
    "1e-6",
    "2024-01-01",
    "a: b",
    "# x",
    "é→\U0001f600",
    " lead",
    "two\nlines\n",
    "=",
    "<<",
    "'\"",
    "x" * 300,
]


@pytest.mark.parametrize(
    "value",
    [
        *TRICKY,
        "",
        "null",
        "0x1f",
        "1_000",
        "@a",
        "*a",
        "- b",
        "\t",
        "%x",
        "---",
        "\x85",
        "\ufeff",
        "\u2028",
        "\r\n",
        "\x1b",
        "a\n\n b ",
    ],
)
def test_dump_keeps_text_as_it_is(tmp_path, value):
    origin = {"fn": "a:b", "args": {value: value, "list": [value, [value]], "empty": [{}, []], "none": None}}
    config = load_config(write(tmp_path, SMALL), [f"data.train=[{json.dumps(origin)}]"]).config
    assert config.data.train[0].args[value] == value
    assert load_config(write(tmp_path, dump_yaml(config), "again.yaml")).config == config


@pytest.mark.parametrize("value", [1e-06, 1e22, 5e-324, 0.1, 1e16, 123456789.123, 2.0])
def test_dump_keeps_numbers_as_they_are(tmp_path, value):
    config = load_config(write(tmp_path, SMALL), [f"data.train.0.args.x={value!r}"]).config
    again = load_config(write(tmp_path, dump_yaml(config), "again.yaml")).config
    assert again == config and math.copysign(again.data.train[0].args["x"], 1) == value


def test_explain_shows_origins_and_the_objective_with_this_configs_numbers(tmp_path):
    path = write(tmp_path, SMALL)
    words = explain(
        load_config(
            path,
            ["stages.rl.loss={kl: {coef: 0.02}, clip_high: 0.28}", "stages.rl.group_size=4", "model.freeze=[vision]"],
        )
    )
    assert re.search(rf"stages\.0\.steps +10 +{re.escape(str(path))}:13", words)
    assert re.search(r"stages\.1\.loss\.kl\.coef +0\.02 +command line", words)
    assert re.search(r"run\.seed +0 +·", words)
    assert "16 prompts x 4 rollouts = 64 rollouts" in words
    assert "min(r_t A_i, clip(r_t, 0.8, 1.28) A_i) + 0.02 · KL" in words
    assert "A_i = (R_i - mean(R)) / (std(R) + 0.0001), over the 4 rollouts of one prompt" in words
    assert "projector, language; frozen: vision" in words
    # Of models with experts.
    routed = explain(load_config(path, ["model.freeze_router=true", "stages.rl.loss.routing_replay=learner"]))
    assert "vision, projector, language; frozen: routers of experts" in routed
    assert "sends tokens to the experts that it chose as the step began" in routed


def test_explain_follows_the_options(tmp_path):
    overrides = [
        "stages.rl.advantage={scale: none}",
        "stages.rl.sampling.top_k=5",
        "stages.rl.validation={stop_at_mean_reward: 0.7}",
        "data.validation=[{fn: a:b}]",
        "stages.cold.optimizer={lr_schedule: cosine, warmup_steps: 3, lr: 1e-3, final_lr_frac: 0.1}",
        "rewards.terms.0.when={task: [count], level: [hard, harder]}",
        "rewards.terms.0.requires=form",
        "rewards.terms.0.transform={clip: [0, 0.9], rescale_to: [-1, 1]}",
        "rewards.terms.0.schedule={points: [[0, 1], [50, 0.5]]}",
    ]
    words = explain(load_config(write(tmp_path, SMALL), overrides))
    assert "A_i = R_i - mean(R), over the 8 rollouts of one prompt; nothing scales it" in words
    assert "top_k 5: Sample among the k most likely tokens" in words
    assert "no reference model is kept" in words
    assert "once the validation reward reaches 0.7 (measured every 50 steps)" in words
    assert "final_lr_frac 0.1: Share of the peak rate that is left" in words
    assert (
        "+1 · exact (mmrl_rewards.number:exact, only where task is count, only where level is hard or harder, "
        "0 unless form > 0, clipped to [0, 0.9], stretched to [-1, 1], "
        "its weight times 1 at step 0, 0.5 at step 50, linear between)"
    ) in words
    assert "a response that cannot be scored: skip; a reward that raises: stop" in words
    assert "nothing is frozen" in words


def test_explain_says_what_mini_batches_are(tmp_path):
    words = explain(load_config(write(tmp_path, SMALL), ["stages.rl.num_mini_batches=4", "stages.rl.ppo_epochs=2"]))
    assert "= 128 rollouts, then 8 optimizer steps, each with 1/4 of the prompts, on them" in words
    assert "N counts every sampled token of a mini-batch" in words
    assert "π_old as recorded while sampling; clipped per token" in words


@pytest.mark.parametrize(
    ("override", "ratio"),
    [
        ("loss={old_logprobs: recomputed}", "π_old computed by the learner as the step begins (one more forward pass)"),
        ("loss={old_logprobs: recomputed, rollout_correction: {method: tis}}", "w_t = π_old(y_t) / π_sampler(y_t)"),
        ("loss={kl: {coef: 0.1, apply_to: reward}}", "π_old as recorded while sampling; clipped per token"),
        (
            "replay={old_logprobs: recomputed}",
            "old_logprobs recomputed: Denominator of a replayed",
        ),
    ],
)
def test_explain_names_the_old_log_probs_of_mini_batches(tmp_path, override, ratio):
    overrides = ["stages.rl.num_mini_batches=4", f"stages.rl.{override}"]
    assert ratio in explain(load_config(write(tmp_path, SMALL), overrides))


def test_explain_states_an_adapter_and_rates_by_role(tmp_path):
    overrides = [
        "model.lora={rank: 8, targets: [language.mlp, vision.mlp]}",
        "stages.rl.optimizer={lr: 1e-5, lr_by_component: {vision: 2e-6}, weight_decay: 0.1, weight_decay_on: matrices}",
    ]
    path = write(tmp_path, SMALL)
    words = explain(load_config(path, overrides))
    assert "an adapter of rank 8, on language.mlp, vision.mlp; all weights are frozen" in words
    assert "W' = W + 32 / 8 · B A\n" in words
    assert "lr 1e-05: Learning rate at its peak" in words and "lr_by_component {vision: 2e-06, " in words
    assert "weight_decay_on matrices: Parameters that decay" in words
    words = explain(load_config(path, ["model.lora={use_dora: true, use_rslora: true, dropout: 0.1}"]))
    assert "W' = m · V / |V|, row by row, with V = W + 32 / sqrt(16) · B A and m learned" in words
    assert "of rank 16, dropout 0.1, on attention and feed-forward layers of the language model" in words


def test_json_schema_agrees_with_the_loader(tmp_path):
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    validator.check_schema(config_json_schema())
    checks = validator(config_json_schema())
    for text in (SMALL, FULL, "extends: base.yaml\nrun: {seed: 3}\n"):
        tree = YAML(typ="safe", pure=True).load(text)
        run = tree["run"] if "extends" in tree else None
        errors = [error for error in checks.iter_errors(tree) if not (run and "'name' is a required" in error.message)]
        assert errors == []
    for path, wrong in (("run.seed", "3"), ("stages.1.kind", "grpo"), ("model.zzz", 1), ("stages.0.steps", 0)):
        tree = full_tree()
        put(tree, path, wrong)
        assert not checks.is_valid(tree), path


def test_json_schema_describes_every_setting():
    schema = config_json_schema()
    for name, definition in schema["$defs"].items():
        for key, setting in definition["properties"].items():
            assert "description" in setting or "$ref" in setting, f"{name}.{key}"


def test_config_loads_no_torch():
    code = "import sys, mmrl.config; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_response_format_is_loaded_and_refuses_equal_tags(tmp_path):
    path = write(tmp_path, SMALL)
    answer = load_config(
        path, ["response_format={style: json, answer_tag: result, sections: [{tag: plan, required: false}]}"]
    ).config.response_format
    assert (answer.style, answer.answer_tag, answer.sections[0].tag, answer.sections[0].required) == (
        "json",
        "result",
        "plan",
        False,
    )
    with pytest.raises(UserError, match="two parts of a response are named 'think'"):
        load_config(path, ["response_format.answer_tag=think"])
    with pytest.raises(UserError, match="response_format.think_tag"):
        load_config(path, ["response_format.think_tag=<x>"])
