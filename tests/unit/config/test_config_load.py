"""Loading a config: values, origins, `extends`, overrides, and export as YAML and JSON Schema."""

import json
import math

import pytest
from config_samples import FULL, SMALL, full_tree, put, refused, write
from ruamel.yaml import YAML

from mmrl.config import config_json_schema, dump_yaml, flatten_settings, load_config, locate_errors
from mmrl.types import UserError


def loaded(tmp_path, *overrides):
    return load_config(write(tmp_path, SMALL), overrides).config


def test_a_small_config_gets_defaults(tmp_path):
    config = loaded(tmp_path)
    assert config.run.seed == 0
    assert [stage.kind for stage in config.stages] == ["sft", "rl"]
    assert config.stages[1].group_size == 8


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
def test_values_are_read_as_yaml_1_2(tmp_path, written, meant):
    text = SMALL.replace("fn: mmrl_datasets.generators.scenes:count", f"fn: a:b\n      args: {{on: {written}}}")
    assert load_config(write(tmp_path, text)).config.data.train[0].args == {"on": meant}


def test_each_setting_has_an_origin(tmp_path):
    path = write(tmp_path, SMALL)
    loaded = load_config(path, ["stages.rl.steps=3"])
    assert loaded.origins["run.name"] == f"{path}:1"
    assert loaded.origins["data.train.0.fn"] == f"{path}:6"
    assert loaded.origins["stages.0.steps"] == f"{path}:13"
    assert loaded.origins["stages.1.steps"] == "command line"
    assert loaded.origins["run.seed"] == "default"
    assert set(loaded.origins) == set(flatten_settings(loaded.config.model_dump(mode="json")))


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("data.train.0.fn", "{path}:6: data.train.0.fn: "),
        ("stages.1.loss.kl", "{path}:15: stages.1.loss.kl: "),  # nobody wrote it, so the stage is named
        ("run.seed", "{path}:1: run.seed: "),
        ("evaluation.temperature", "{path}: evaluation.temperature: "),
        ("no.such.key", ""),
    ],
)
def test_an_error_about_a_setting_names_the_nearest_line_that_somebody_wrote(tmp_path, key, place):
    path = write(tmp_path, SMALL)
    with pytest.raises(UserError) as caught, locate_errors(load_config(path)):
        raise UserError("wrong", key=key)
    assert str(caught.value) == f"{place.format(path=path)}wrong"


def test_extends_merges_mappings_and_replaces_lists(tmp_path):
    write(tmp_path, SMALL + "evaluation: {batch_size: 3, temperature: 0.5}\n", "base.yaml")
    (tmp_path / "sub").mkdir()
    text = "extends: ../base.yaml\nevaluation: {batch_size: 4}\nstages: [{kind: sft, name: s, steps: 1}]\n"
    path = write(tmp_path / "sub", text)
    loaded = load_config(path)
    assert (loaded.config.evaluation.batch_size, loaded.config.evaluation.temperature) == (4, 0.5)
    assert [stage.name for stage in loaded.config.stages] == ["s"]
    assert loaded.origins["evaluation.batch_size"] == f"{path}:2"
    assert loaded.origins["evaluation.temperature"] == f"{tmp_path}/sub/../base.yaml:17"
    assert loaded.files == (path, tmp_path / "sub" / "../base.yaml")


def test_of_several_bases_the_later_wins_and_null_unsets(tmp_path):
    write(tmp_path, SMALL, "a.yaml")
    write(tmp_path, "run: {seed: 1}\nmodel: {dtype: float32}\n", "b.yaml")
    write(tmp_path, "run: {seed: 2}\n", "c0.yaml")
    path = write(tmp_path, "extends: [a.yaml, b.yaml, c0.yaml]\nmodel: {from_scratch: null, path: some/model}\n")
    config = load_config(path).config
    assert (config.run.seed, config.model.dtype, config.model.path) == (2, "float32", "some/model")
    assert config.model.from_scratch is None


def test_a_circle_of_extends_is_refused_with_the_file_that_closes_it(tmp_path):
    write(tmp_path, "extends: b.yaml\n", "a.yaml")
    write(tmp_path, "# two\nextends: a.yaml\n", "b.yaml")
    message = refused(tmp_path / "a.yaml")
    assert "b.yaml:2: extends: " in message and "a.yaml -> b.yaml -> a.yaml" in message


def test_extends_cannot_multiply_without_bound(tmp_path):
    for i in range(20):
        write(tmp_path, f"extends: [{i + 1}.yaml, {i + 1}.yaml]\n", f"{i}.yaml")
    write(tmp_path, SMALL, "20.yaml")
    assert "100 at most" in refused(tmp_path / "0.yaml")


def test_overrides_reach_lists_stages_and_args(tmp_path):
    config = loaded(
        tmp_path,
        "stages.1.optimizer={lr: 1, betas: [0, 0.5]}",  # integers serve as numbers
        "stages.rl.loss.kl.coef=0.1",
        "data.train.0.args.a.b=[1, 2]",
        "run.seed=1",
        "run.seed=2",
    )
    assert (config.stages[1].optimizer.lr, config.stages[1].optimizer.betas) == (1.0, (0.0, 0.5))
    assert config.stages[1].loss.kl.coef == 0.1
    assert config.data.train[0].args == {"a": {"b": [1, 2]}}
    assert config.run.seed == 2


@pytest.mark.parametrize("text", [SMALL, FULL])
def test_dumped_yaml_loads_back_equal(tmp_path, text):
    config = load_config(write(tmp_path, text)).config
    assert load_config(write(tmp_path, dump_yaml(config), "again.yaml")).config == config


@pytest.mark.parametrize(
    "value",
    [
        *("on", "1e-6", "2024-01-01", "a: b", "# x", "é→\U0001f600", " lead", "two\nlines\n", "=", "<<", "'\""),
        *("x" * 300, "", "null", "0x1f", "1_000", "@a", "*a", "- b", "\t", "%x", "---", "\x85", "\ufeff", "\u2028"),
        *("\r\n", "\x1b", "a\n\n b "),
    ],
)
def test_dumped_yaml_keeps_text(tmp_path, value):
    source = {"fn": "a:b", "args": {value: value, "list": [value, [value]], "empty": [{}, []], "none": None}}
    config = loaded(tmp_path, f"data.train=[{json.dumps(source)}]")
    assert config.data.train[0].args[value] == value
    assert load_config(write(tmp_path, dump_yaml(config), "again.yaml")).config == config


@pytest.mark.parametrize("value", [1e-06, 1e22, 5e-324, 0.1, 1e16, 123456789.123, 2.0])
def test_dumped_yaml_keeps_numbers(tmp_path, value):
    config = loaded(tmp_path, f"data.train.0.args.x={value!r}")
    again = load_config(write(tmp_path, dump_yaml(config), "again.yaml")).config
    assert again == config and math.copysign(again.data.train[0].args["x"], 1) == value


def test_json_schema_accepts_and_refuses_what_the_loader_does():
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    validator.check_schema(config_json_schema())
    checks = validator(config_json_schema())
    for text in (SMALL, FULL):
        assert checks.is_valid(YAML(typ="safe", pure=True).load(text))
    assert checks.is_valid({"extends": "base.yaml", "run": {"name": "a"}})
    for path, wrong in (("run.seed", "3"), ("stages.1.kind", "grpo"), ("model.zzz", 1), ("stages.0.steps", 0)):
        tree = full_tree()
        put(tree, path, wrong)
        assert not checks.is_valid(tree), path


def test_json_schema_describes_every_setting():
    for name, definition in config_json_schema()["$defs"].items():
        for key, setting in definition["properties"].items():
            assert "description" in setting or "$ref" in setting, f"{name}.{key}"
