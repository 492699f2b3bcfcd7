"""The config room: what loads, what is refused and in which words, and where each value came from."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from mmrl.config import Config, cap_steps, dump, explain, json_schema, load, settings
from mmrl.types import UserError

SMALL = """\
run: {name: demo}
model:
  scratch: {}
data:
  train:
    - fn: mmrl_datasets.scenes:count
rewards:
  terms:
    - fn: mmrl_rewards.number:exact
stages:
  - kind: sft
    name: cold
    steps: 10
  - kind: rl
    name: rl
    steps: 20
"""

FULL = """\
run: {name: demo, dir: out, seed: 1, threads: 2, keep_rollouts_every: 5}
model:
  path: null
  freeze: [vision]
  scratch: {family: qwen3_vl, vision: {depth: 1}, language: {depth: 1}}
data:
  train: [{fn: "a:b", args: {n: 3, deep: {list: [1, {x: 2}]}}}]
  validation: [{fn: "a:c"}]
  test: [{fn: "a:d", args: {on: true}}]
answer: {think: required}
rewards:
  terms: [{fn: "r:x", name: x, weight: 0.5, args: {k: v}, tasks: [count], train_only: true}]
stages:
  - {kind: sft, name: cold, steps: 10, until: {reward: 0.4, each_task: 0.1, every: 5}}
  - {kind: rl, name: rl, steps: 20, until: {reward: 0.9, each_task: 0.5}}
"""


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    return str(caught.value)


def put(tree, path, value):
    """The nested dicts and lists with `value` at the dotted path."""
    *way, last = [int(step) if step.isdecimal() else step for step in path.split(".")]
    inner = tree
    for step in way:
        inner = inner[step]
    inner[last] = value


def to_yaml(tree) -> str:
    import io

    text = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.dump(tree, text)
    return text.getvalue()


def full_tree() -> dict:
    """FULL with every setting spelled out."""
    return json.loads(Config.model_validate_json(json.dumps(YAML(typ="safe", pure=True).load(FULL))).model_dump_json())


def test_small_config_loads_with_defaults(tmp_path):
    config = load(write(tmp_path, SMALL)).config
    assert config.run.seed == 0
    assert [stage.kind for stage in config.stages] == ["sft", "rl"]
    assert config.stages[1].group_size == 8


def test_lists_become_tuples_and_integers_serve_as_numbers(tmp_path):
    config = load(
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
def test_yaml_means_what_it_says(tmp_path, written, meant):
    text = SMALL.replace("fn: mmrl_datasets.scenes:count", f"fn: a:b\n      args: {{on: {written}}}")
    assert load(write(tmp_path, text)).config.data.train[0].args == {"on": meant}


def test_origins_name_file_line_command_line_and_default(tmp_path):
    path = write(tmp_path, SMALL)
    loaded = load(path, ["stages.rl.steps=3"])
    assert loaded.origins["run.name"] == f"{path}:1"
    assert loaded.origins["data.train.0.fn"] == f"{path}:6"
    assert loaded.origins["stages.0.steps"] == f"{path}:13"
    assert loaded.origins["stages.1.steps"] == "command line"
    assert loaded.origins["run.seed"] == "default"
    assert set(loaded.origins) == set(settings(loaded.config.model_dump(mode="json")))


WRONG = {
    int: ["3", 1.5, True, [1], {"a": 1}, None],
    float: ["0.5", True, [1.0], {"a": 1}, None],
    bool: ["yes", 1, [True], {"a": 1}, None],
    str: [3, True, [1], {"a": 1}],
    list: ["x", 3, {"a": 1}, None],
    dict: ["x", 3, [1], None],
}


NULLABLE = {"stages.0.until.each_task", "stages.1.until.each_task"}


@pytest.mark.parametrize("turn", range(6))
def test_every_setting_refuses_a_wrong_type_by_path_and_line(tmp_path, turn):
    right = {path: value for path, value in settings(full_tree()).items() if ".args" not in path}
    right = {path: value for path, value in right.items() if not path.endswith(".kind") and path != "model.path"}
    assert len(right) > 80
    tree, wrong = full_tree(), {}
    for index, (path, value) in enumerate(right.items()):
        choices = [choice for choice in WRONG[type(value)] if choice is not None or path not in NULLABLE]
        wrong[path] = choices[turn % len(choices)]
        put(tree, path, f"MARK-{index}-")
    text = to_yaml(tree)
    lines = {path: text.split(f"MARK-{index}-")[0].count("\n") + 1 for index, path in enumerate(right)}
    for index, path in enumerate(right):
        text = text.replace(f"MARK-{index}-", json.dumps(wrong[path]))
    said = refused(write(tmp_path, text)).splitlines()
    assert len(said) == len(right)
    for path, line in lines.items():
        assert any(problem.startswith(f"{tmp_path}/c.yaml:{line}: {path}") for problem in said), (path, wrong[path])


def test_every_mapping_refuses_an_unknown_key(tmp_path):
    tree = full_tree()
    places = {path.rpartition(".")[0] for path in settings(tree) if ".args" not in path} - {""}
    assert {"stages.1.loss", "model.scratch.vision", "data.train.0"} < places
    for place in places:
        put(tree, f"{place}.zzz", 1)
    said = refused(write(tmp_path, to_yaml(tree)))
    for place in places:
        assert re.search(rf"c\.yaml:\d+: {re.escape(place)}\.zzz: unknown key; the keys here are ", said), place


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.sed=1", "command line: run.sed: unknown key; did you mean `seed`?"),
        ("seed=1", "command line: seed: unknown key; did you mean `run.seed`?"),
        ("stages.rl.lr=1e-4", "command line: stages.1.lr: unknown key; did you mean `optimizer.lr`?"),
        ("stages.cold.group_size=4", "stages.0.group_size: unknown key"),
        ("extends=x.yaml", "command line: extends: unknown key"),
        ("stages.rl.steps='3'", "stages.1.steps: must be a whole number, got the text '3'; remove the quotes"),
        ("stages.rl.steps=3.0", "stages.1.steps: must be a whole number, got 3.0; write 3"),
        ("stages.rl.steps=0", "stages.1.steps: must be greater than or equal to 1, got 0"),
        ("stages.rl.steps=", "stages.1.steps: must be a whole number, got nothing (null); leave the key out"),
        ("stages.rl.group_size=1", "stages.1: group_size 1 leaves a group nothing to compare"),
        ("stages.rl.sampling.temperature=0", "stages.1: temperature 0 makes all rollouts of a group equal"),
        ("stages.rl.shared_prefix=on", "stages.1.shared_prefix: must be true or false, got the text 'on'; write true"),
        ("stages.rl.kind=grpo", "stages.1.kind: must be 'sft' or 'rl', got the text 'grpo'"),
        ("stages.rl.kind=rll", "stages.1.kind: must be 'sft' or 'rl', got the text 'rll'; did you mean 'rl'?"),
        ("stages.rl.kind=3", "stages.1.kind: must be 'sft' or 'rl', got 3"),
        ("stages.rl.name=cold", "stages: stage names must be unique, got cold, cold"),
        ("stages.rl.name=a/b", "stages.1.name: must serve as a file name"),
        ("stages.rl.until={reward: 0.5}", "stages: stage 'rl' has `until`, which needs `data.validation`"),
        ("stages.rl.until={}", "stages.1.until.reward: missing; mean greedy reward"),
        ("stages.rl={}", "stages.1.kind: missing; write one of 'sft' or 'rl'"),
        ("stages.rl=3", "stages.1: must be a mapping, got 3"),
        ("stages=[]", "stages: needs at least one entry"),
        ("stages.rl.optimizer.betas=[0.9]", "stages.1.optimizer.betas: needs 2 values, got 1"),
        ("stages.rl.optimizer.betas=[0.9, 1, 2]", "stages.1.optimizer.betas: needs 2 values, got 3"),
        ("stages.rl.optimizer.betas=[0.9, 1]", "stages.1.optimizer.betas.1: must be less than 1, got 1"),
        ("stages.rl.optimizer.lr=.nan", "stages.1.optimizer.lr: .nan is not a finite number"),
        ("stages.rl.optimizer.lr=1e999", "stages.1.optimizer.lr: 1e999 is not a finite number"),
        ("data.train.0.args.x=-.inf", "data.train.0.args.x: -.inf is not a finite number"),
        ("model.freeze=vision", "model.freeze: must be a list, got the text 'vision'; write [vision]"),
        ("model.freeze=[visoin]", "model.freeze.0: must be 'vision', 'projector' or 'language', got the text 'visoin'"),
        ("model.path=x", "model: set exactly one of `path` (a folder or hub id) and `scratch`"),
        ("model.scratch=null", "model: set exactly one of `path` (a folder or hub id) and `scratch`"),
        ("model.min_pixels=9999999", "model: min_pixels 9999999 exceeds max_pixels"),
        ("model.scratch.language.heads=5", "model.scratch.language: width 96 must be a multiple of 2 x heads (5)"),
        ("model.scratch.vision.heads=5", "model.scratch.vision: width 64 must be a multiple of 4 x heads (5)"),
        ("model.scratch.language.kv_heads=3", "model.scratch.language: heads 4 must be a multiple of kv_heads 3"),
        (
            "model.scratch.language.vocab=299",
            "model.scratch.language.vocab: must be greater than or equal to 300, got 299",
        ),
        ("model.scratch.family=qwen2_5vl", "did you mean 'qwen2_5_vl'?"),
        ("rewards.terms=[]", "rewards.terms: needs at least one entry"),
        ("rewards.terms.0.fn=3", "rewards.terms.0.fn: must be text, got 3; put quotes around it"),
        ("data.train={fn: x}", "data.train: must be a list, got a mapping; begin each entry with `- `"),
        ("answer=", "answer: must be a mapping, got nothing (null); leave the key out to keep the default"),
        ("run.name=", "run.name: must be text, got nothing (null)"),
        ("run.name='a/../b'", "run.name: must serve as a file name"),
        ("run=", "run: must be a mapping"),
        ("stages.xl.steps=1", "command line: stages.xl: no such entry; there is 0, 1, cold, rl"),
        ("stages.2.steps=1", "command line: stages.2: no such entry"),
        ("stages." + "9" * 5000 + "=1", "no such entry"),
        ("model.freeze.0=vision", "must be a list"),
        ("run.name.x=1", "command line: run.name: is 'demo', a single value; nothing can be set beneath it"),
        ("run.seed", "command line: 'run.seed' is no override; write dotted.path=value"),
        ("=1", "is no override"),
        ("run..seed=1", "is no override"),
        ("a" + ".a" * 3000 + "=1", "levels deep"),
        (
            "run.name=@x",
            "command line: run.name: not valid YAML: found character '@' that cannot start any token; put quotes",
        ),
        ("run.name=[", "command line: run.name: not valid YAML"),
        ("run.name=!foo x", "command line: run.name: the tag !foo means nothing here; remove it"),
        ("run.seed=!!int x", "command line: run.seed: 'x' cannot be read as int"),
        ("run.seed=" + "9" * 5000, "cannot be read as int"),
        ("run.name=!!set {a}", "means nothing here"),
        ('run.name="\\ud800"', "run.name: half of a surrogate pair"),
        ("run.name=\x00", "command line: run.name: not valid YAML: unprintable character"),
    ],
)
def test_a_bad_override_is_refused_in_words(tmp_path, override, said):
    assert said in refused(write(tmp_path, SMALL), override)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "c.yaml is empty"),
        ("# only a comment\n", "c.yaml is empty"),
        ("- a\n- b\n", "c.yaml:1: a config is a mapping"),
        ("just text\n", "c.yaml:1: a config is a mapping"),
        ("run: {name: a\nmodel: x\n", "c.yaml:2: not valid YAML"),
        ("run:\n\tname: a\n", "c.yaml:2: not valid YAML: found character '\\t' that cannot start any token"),
        ("run: a: b\n", "c.yaml:1: not valid YAML: mapping values are not allowed here"),
        ("a: 1\n---\nb: 2\n", "c.yaml:2: not valid YAML"),
        ("a: *x\n", "c.yaml:1: not valid YAML: found undefined alias"),
        ("a: 1\nb: \x07\n", "c.yaml:2: not valid YAML: unprintable character"),
        ("a: &a [*a]\n", "levels, aliases expanded"),
        ("a: " + "[" * 3000 + "]" * 3000, "levels deep"),
        ("a: " + "[" * 80 + "]" * 80, "64 levels"),
        (
            "\n".join(["a: &a0 [x]", *(f"b{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9))]),
            "100000 values",
        ),
        (f"a: {'x' * 1_000_001}\n", "larger than 1000000 bytes"),
        (SMALL + "run: {name: b}\n", "c.yaml:17: run: set twice, first at "),
        (SMALL + "1: b\n", "c.yaml:17: the key 1 is not text; put quotes around it"),
        (SMALL + "? [a]\n: b\n", "is not text"),
        (SMALL + "<<: {a: 1}\n", "c.yaml:17: merge keys (<<) are not read; use `extends: other.yaml`"),
        (SMALL + "extends: 3\n", "c.yaml:17: extends: must be a file name or a list of them"),
        (SMALL + "extends: nope.yaml\n", "c.yaml:17: extends: "),
        (SMALL + "extends: c.yaml\n", "c.yaml:17: extends: "),
        ("run: {name: a}\n", "c.yaml:1: model: missing; the policy"),
    ],
)
def test_a_bad_file_is_refused_in_words(tmp_path, text, said):
    assert said in refused(write(tmp_path, text))


def test_missing_file_directory_and_binary_are_refused(tmp_path):
    assert "no such file" in refused(tmp_path / "nope.yaml")
    assert "is a directory" in refused(tmp_path)
    assert "no file name" in refused(Path("a\x00b"))
    (tmp_path / "b.yaml").write_bytes(b"run: {name: a}\nx: \xff\n")
    assert "b.yaml:2: not UTF-8 text (byte 0xff)" in refused(tmp_path / "b.yaml")


def test_all_errors_come_at_once_one_per_line(tmp_path):
    text = SMALL.replace("steps: 10", "steps: ten\n    stepz: 3").replace(
        "run: {name: demo}", "run: {name: 1, name: 2}"
    )
    lines = refused(write(tmp_path, text), "model.dtype=float16", "data.train.0.args.x=.inf").splitlines()
    assert len(lines) == 5
    assert [re.sub(r"^.*?c\.yaml:", "", line).split(": ")[:2] for line in lines] == [
        ["1", "run.name"],
        ["command line", "data.train.0.args.x"],
        ["command line", "model.dtype"],
        ["13", "stages.0.steps"],
        ["14", "stages.0.stepz"],
    ]


def test_extends_merges_mappings_and_replaces_lists(tmp_path):
    write(tmp_path, SMALL + "evaluation: {batch_size: 3, temperature: 0.5}\n", "base.yaml")
    (tmp_path / "sub").mkdir()
    path = write(
        tmp_path / "sub",
        "extends: ../base.yaml\nevaluation: {batch_size: 4}\nstages: [{kind: sft, name: s, steps: 1}]\n",
    )
    loaded = load(path)
    assert (loaded.config.evaluation.batch_size, loaded.config.evaluation.temperature) == (4, 0.5)
    assert [stage.name for stage in loaded.config.stages] == ["s"]
    assert loaded.origins["evaluation.batch_size"] == f"{path}:2"
    assert loaded.origins["evaluation.temperature"] == f"{tmp_path}/sub/../base.yaml:17"
    assert loaded.files == (path, tmp_path / "sub" / "../base.yaml")


def test_extends_takes_a_list_later_ones_win_and_null_unsets(tmp_path):
    write(tmp_path, SMALL, "a.yaml")
    write(tmp_path, "run: {seed: 1}\nmodel: {dtype: float32}\n", "b.yaml")
    write(tmp_path, "run: {seed: 2}\n", "c0.yaml")
    path = write(tmp_path, "extends: [a.yaml, b.yaml, c0.yaml]\nmodel: {scratch: null, path: some/model}\n")
    config = load(path).config
    assert (config.run.seed, config.model.dtype, config.model.path, config.model.scratch) == (
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


def test_overrides_reach_every_place(tmp_path):
    overrides = [
        "stages.1.optimizer.lr=1e-4",
        "stages.rl.loss.kl_coef=0.1",
        "data.train.0.args.a.b=[1, 2]",
        "run.name=x=y",
    ]
    path = write(tmp_path, SMALL)
    assert "file name" in refused(path, *overrides)
    config = load(path, overrides[:-1]).config
    assert config.stages[1].optimizer.lr == 1e-4
    assert config.stages[1].loss.kl_coef == 0.1
    assert config.data.train[0].args == {"a": {"b": [1, 2]}}
    assert load(path, ["run.seed=1", "run.seed=2"]).config.run.seed == 2


def test_cap_steps(tmp_path):
    path = write(tmp_path, SMALL)
    capped = cap_steps(load(path), 15)
    assert [stage.steps for stage in capped.config.stages] == [10, 15]
    assert capped.origins["stages.0.steps"] == f"{path}:13"
    assert capped.origins["stages.1.steps"] == "command line"
    with pytest.raises(UserError, match="at least 1"):
        cap_steps(capped, 0)


@pytest.mark.parametrize("text", [SMALL, FULL])
def test_dump_loads_back_equal(tmp_path, text):
    config = load(write(tmp_path, text)).config
    assert load(write(tmp_path, dump(config), "again.yaml")).config == config


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
    config = load(write(tmp_path, SMALL), [f"data.train=[{json.dumps(origin)}]"]).config
    assert config.data.train[0].args[value] == value
    assert load(write(tmp_path, dump(config), "again.yaml")).config == config


@pytest.mark.parametrize("value", [1e-06, 1e22, 5e-324, 0.1, 1e16, 123456789.123, 2.0])
def test_dump_keeps_numbers_as_they_are(tmp_path, value):
    config = load(write(tmp_path, SMALL), [f"data.train.0.args.x={value!r}"]).config
    again = load(write(tmp_path, dump(config), "again.yaml")).config
    assert again == config and math.copysign(again.data.train[0].args["x"], 1) == value


def test_explain_shows_origins_and_the_objective_with_this_configs_numbers(tmp_path):
    path = write(tmp_path, SMALL)
    words = explain(
        load(
            path, ["stages.rl.loss={kl_coef: 0.02, clip_high: 0.28}", "stages.rl.group_size=4", "model.freeze=[vision]"]
        )
    )
    assert re.search(rf"stages\.0\.steps +10 +{re.escape(str(path))}:13", words)
    assert re.search(r"stages\.1\.loss\.kl_coef +0\.02 +command line", words)
    assert re.search(r"run\.seed +0 +·", words)
    assert "16 prompts x 4 rollouts = 64 rollouts" in words
    assert "min(r_t A_i, clip(r_t, 0.8, 1.28) A_i) + 0.02 · KL" in words
    assert "A_i = (R_i - mean(R)) / (std(R) + 0.0001), over the 4 rollouts of one prompt" in words
    assert "projector, language; frozen: vision" in words


def test_explain_follows_the_options(tmp_path):
    overrides = [
        "stages.rl.advantage={scale: none}",
        "stages.rl.sampling.top_k=5",
        "stages.rl.until={reward: 0.7, each_task: 0.2}",
        "data.validation=[{fn: a:b}]",
        "stages.cold.optimizer={decay: cosine, warmup_steps: 3, lr: 1e-3, final_lr_frac: 0.1}",
        "rewards.terms.0.tasks=[count]",
    ]
    words = explain(load(write(tmp_path, SMALL), overrides))
    assert "A_i = R_i - mean(R), over the 8 rollouts of one prompt; nothing scales it" in words
    assert "no top-p, top-k 5" in words
    assert "no reference model is kept" in words
    assert "once the held-out reward reaches 0.7 and every task's reaches 0.2 (looked at every 50 steps)" in words
    assert "lr 0.001, rising over 3 steps, then cosine to 0.0001" in words
    assert "+1 · exact (mmrl_rewards.number:exact, only on count)" in words
    assert "nothing is frozen" in words


def test_json_schema_agrees_with_the_loader(tmp_path):
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    validator.check_schema(json_schema())
    checks = validator(json_schema())
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
    schema = json_schema()
    for name, definition in schema["$defs"].items():
        for key, setting in definition["properties"].items():
            assert "description" in setting or "$ref" in setting, f"{name}.{key}"


def test_config_loads_no_torch():
    code = "import sys, mmrl.config; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
