"""Configs that are refused: by key, by line of the file, and by type."""

import json
import re
from pathlib import Path

import pytest
from config_samples import SMALL, full_tree, put, refused, to_yaml, write

from mmrl.config import flatten_settings, load_config
from mmrl.config.schema import HealthConfig

WRONG = {
    int: ["3", 1.5, True, [1], {"a": 1}, None],
    float: ["0.5", True, [1.0], {"a": 1}, None],
    bool: ["yes", 1, [True], {"a": 1}, None],
    str: [3, True, [1], {"a": 1}],
    list: ["x", 3, {"a": 1}, None],
    dict: ["x", 3, [1], None],
}


NULLABLE = {f"stages.{i}.validation.stop_at_mean_reward" for i in (0, 1)}
NULLABLE |= {
    f"stages.1.rollout_steps.1.{key}" for key in ("max_attempts_per_group", "temperature", "max_kept_per_group")
}
NULLABLE |= {f"stages.1.rollout_steps.0.{key}" for key in ("partial_rollout_tokens", "max_tokens_per_step")}
NULLABLE |= {"stages.1.rollout_steps.2.tools.0.name", "stages.1.rollout_steps.3.name"}
NULLABLE |= {"data.train.0.weight", "stages.0.optimizer.lr_by_component.language"}
NULLABLE |= {f"rewards.terms.0.{key}" for key in ("requires", "fallback")} | {"rewards.terms.1.timeout_s"}
NULLABLE |= {f"data.train.0.row_filter.{key}" for key in ("low", "high")}
NULLABLE |= {f"evaluation.benchmarks.0.{key}" for key in ("benchmark", "every", "split", "coordinates")}
NULLABLE |= {"evaluation.benchmarks.1.temperature", "model.lora.targets"}
NULLABLE |= {f"stages.1.replay.{key}" for key in ("capacity", "max_staleness")}
NULLABLE |= {f"stages.1.health.{key}" for key in HealthConfig.model_fields if key != "window"}
NULLABLE |= {f"rewards.terms.1.transform.{key}" for key in ("clip", "threshold", "rescale_to")}


@pytest.mark.parametrize("turn", range(6))
def test_every_setting_refuses_a_wrong_type_by_path_and_line(tmp_path, turn):
    right = {
        path: value for path, value in flatten_settings(full_tree()).items() if not re.search(r"\.(args|when)", path)
    }
    right = {path: value for path, value in right.items() if not path.endswith(".kind") and value is not None}
    assert len(right) > 80
    tree, wrong = full_tree(), {}
    for index, (path, value) in enumerate(right.items()):
        choices = [choice for choice in WRONG[type(value)] if choice is not None or path not in NULLABLE]
        # A mapping is read as a function of the user's, which lacks one key and has an unknown one.
        if path in ("rollout.engine", "stages.1.loss.policy_loss"):
            choices = [choice for choice in choices if not isinstance(choice, dict)]
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
    places = {
        path.rpartition(".")[0] for path in flatten_settings(tree) if not re.search(r"\.(args|when|points)", path)
    } - {""}
    assert {"stages.1.loss", "model.from_scratch.vision", "data.train.0"} < places
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
        ("stages.rl={kind: rl, name: rl, steps: 1, group_size: 1, advantage: {baseline: none}}", "nothing to compare"),
        ("stages.rl.num_mini_batches=0", "stages.1.num_mini_batches: must be greater than or equal to 1, got 0"),
        ("stages.rl.num_mini_batches=17", "stages.1: num_mini_batches 17 leaves some without a group of"),
        ("stages.rl.algorithm=grop", "stages.1.algorithm: must be 'grpo', "),
        ("stages.rl.algorithm=gsop", "got the text 'gsop'; did you mean 'gspo'?"),
        ("stages.rl.algorithm=[gspo]", "stages.1.algorithm: must be 'grpo', "),
        ("stages.rl.loss.kl_coef=0.1", "stages.1.loss.kl_coef: unknown key"),
        ("stages.rl.loss.kl={coef: 0.1, estimator: k1}", "stages.1.loss.kl: the gradient of k1 in the loss is 0 on av"),
        ("stages.rl.loss.rollout_correction.method=mask", "stages.1.loss: rollout_correction 'mask' needs"),
        ("stages.rl.loss.rollout_correction={low: 3}", "stages.1.loss.rollout_correction: low 3.0 must be below high"),
        ("stages.rl.loss={policy_loss: cispo, dual_clip: 3}", "stages.1.loss: dual_clip bounds the clipped policy"),
        ("stages.rl.loss.dual_clip=1", "stages.1.loss.dual_clip: must be greater than 1, got 1"),
        ("stages.rl.loss.fixed_length=9", "stages.1.loss: fixed_length is for `aggregation: fixed`, not for 'token'"),
        ("stages.rl.reference.update=ema", "stages.1: reference.update 'ema' has no effect without `loss.kl.coef`"),
        ("stages.rl.reference.update=reset", "stages.1.reference: a reference reset every step is the policy it"),
        ("stages.rl.reference.reset_optimizer=true", "stages.1.reference: reset_optimizer is for `update: reset`"),
        ("stages.rl.advantage.difficulty_weight={}", "stages.1.advantage.difficulty_weight.term: missing; the reward"),
        ("stages.rl.sampling.temperature=0", "stages.1: temperature 0 makes all rollouts of a group equal"),
        ("stages.rl.replay.capacity=0", "stages.1.replay.capacity: must be greater than or equal to 1, got 0"),
        ("stages.rl.replay.priority_exponent=-1", "stages.1.replay.priority_exponent: must be greater than or equal"),
        ("stages.rl.replay.priority_exponent=.inf", "stages.1.replay.priority_exponent: .inf is not a finite number"),
        ("stages.rl.replay.max_staleness=0", "stages.1.replay.max_staleness: must be greater than or equal to 1, got"),
        ("stages.rl.replay.target_fraction=0", "stages.1.replay.target_fraction: must be greater than 0, got 0"),
        ("stages.rl.replay.fill=fraction", "stages.1.replay.fill: this key is gone; replay fills a step"),
        ("stages.rl.replay.resample_fresh=true", "stages.1.replay: `resample_fresh` draws with replacement, which"),
        ("stages.rl.replay.preset=papre", "stages.1.replay.preset: must be 'default', 'paper' or 'code', got the text"),
        ("stages.rl.replay.scope=global", "stages.1.replay.scope: unknown key; the keys here are preset, drop_zero"),
        ("stages.rl.dynamic_sampling={}", "stages.1.dynamic_sampling: without `ranges` or `max_truncated_frac` every"),
        ("stages.rl.dynamic_sampling={ranges: [{low: 0.5}]}", "stages.1.dynamic_sampling.ranges.0.term: missing; name"),
        ("stages.rl.dynamic_sampling={ranges: [{term: x, low: 2}]}", "stages.1.dynamic_sampling.ranges.0: low 2.0"),
        ("stages.rl.dynamic_sampling={ranges: [{term: x}], extra: carry}", "stages.1: dynamic_sampling: `extra: carry"),
        ("stages.rl.dynamic_sampling={ranges: [{term: x}], max_rounds: 0}", "max_rounds: must be greater"),
        ("stages.rl.health.window=0", "stages.1.health.window: must be greater than or equal to 1, got 0"),
        ("data.train.0.row_filter={low: 0.1}", "data.train.0.row_filter.column: missing; column of the rows' `meta`"),
        ("data.train.0.row_filter={column: p, low: 2, high: 1}", "data.train.0.row_filter: low 2.0 must not exceed"),
        ("stages.rl.shared_prefix=yes", "stages.1.shared_prefix: must be 'auto', 'on' or 'off', got the text 'yes'"),
        ("stages.rl.kind=grpo", "stages.1.kind: must be 'sft', 'rl', 'sample' or 'select', got the text 'grpo'"),
        ("stages.rl.kind=rll", "got the text 'rll'; did you mean 'rl'?"),
        ("stages.rl.kind=3", "stages.1.kind: must be 'sft', 'rl', 'sample' or 'select', got 3"),
        ("stages.rl.name=cold", "stages: stage names must be unique, got cold, cold"),
        ("stages.rl.name=a/b", "stages.1.name: must serve as a file name"),
        ("stages.rl.validation={stop_at_mean_reward: 0.5}", "stages: stage 'rl' has `validation`, which needs"),
        ("stages.rl={}", "stages.1.kind: missing; write one of 'sft', 'rl', 'sample' or 'select'"),
        ("stages.rl=3", "stages.1: must be a mapping, got 3"),
        ("stages=[]", "stages: needs at least one entry"),
        ("stages.rl.optimizer.betas=[0.9]", "stages.1.optimizer.betas: needs 2 values, got 1"),
        ("stages.rl.optimizer.betas=[0.9, 1, 2]", "stages.1.optimizer.betas: needs 2 values, got 3"),
        ("stages.rl.optimizer.betas=[0.9, 1]", "stages.1.optimizer.betas.1: must be less than 1, got 1"),
        ("stages.rl.optimizer.lr=.nan", "stages.1.optimizer.lr: .nan is not a finite number"),
        ("stages.rl.optimizer.lr=1e999", "stages.1.optimizer.lr: 1e999 is not a finite number"),
        ("data.train.0.args.x=-.inf", "data.train.0.args.x: -.inf is not a finite number"),
        ("model.freeze=vision", "model.freeze: must be a list, got the text 'vision'; write [vision]"),
        ("model.freeze=[vision, projector, language]", "model: `freeze` holds every component of the model; leave at"),
        (
            "model={from_scratch: {}, freeze: [vision], lora: {targets: [language.mlp, vision.mlp]}}",
            "model: `lora` targets vision.mlp, which `freeze` forbids; take it out of one of them",
        ),
        ("stages.rl.freeze=[vision, projector, language]", "stages: stage 'rl': `freeze` holds all that is trained"),
        ("model.lora={targets: []}", "model.lora.targets: needs at least one entry"),
        ("model.lora={targets: [projector.attention]}", "model.lora.targets.0: must be 'language.attention', "),
        ("model.gradient_checkpointing=true", "model.gradient_checkpointing: must be a list, got true"),
        ("model.freeze=[visoin]", "model.freeze.0: must be 'vision', 'projector' or 'language', got the text 'visoin'"),
        ("model.dtype=float16", "model.dtype: must be 'float32' or 'bfloat16', got the text 'float16'; did you mean"),
        ("model.path=x", "model: set exactly one of `path` (a folder or hub id) and `from_scratch`"),
        ("model.from_scratch=null", "model: set exactly one of `path` (a folder or hub id) and `from_scratch`"),
        ("model.min_pixels=9999999", "model: min_pixels 9999999 exceeds max_pixels"),
        ("model.from_scratch.language.num_heads=5", "model.from_scratch.language: hidden_size 96 must be a multiple"),
        ("model.from_scratch.vision.num_heads=5", "model.from_scratch.vision: hidden_size 64 must be a multiple of 4"),
        ("model.from_scratch.language.num_kv_heads=3", "model.from_scratch.language: num_heads 4 must be a multiple"),
        ("model.from_scratch.language.experts_per_token=5", "model.from_scratch.language: experts_per_token 5 exceeds"),
        ("model.from_scratch.language.num_experts=1", "model.from_scratch.language.num_experts: must be greater than"),
        ("model.from_scratch.language.vocab_size=299", "model.from_scratch.language.vocab_size: must be greater than"),
        ("model.from_scratch.family=qwen2_5vl", "did you mean 'qwen2_5_vl'?"),
        ("rewards.terms.0.when.task=count", "rewards.terms.0.when.task: must be a list, got the text 'count'; write"),
        ("rewards.terms.0.tasks=[count]", "rewards.terms.0.tasks: unknown key"),
        ("rewards.on_error=skip_rollout", "rewards.on_error: must be 'stop', 'skip', 'skip_group' or 'fallback', got"),
        ("rewards.timeout_s=0", "rewards.timeout_s: must be greater than 0, got 0"),
        ("rewards.terms.0.schedule={points: [[5, 1], [5, 2]]}", "steps must rise from point to point, got 5, 5"),
        ("rewards={combine: min, terms: [{fn: a:b, weight: 2}]}", "rewards: combine min takes no weights, and a:b has"),
        ("rewards={combine: product, terms: [{fn: a:b, weight: -1}]}", "rewards: combine product takes weights as"),
        ("data.train=[{fn: a, weight: 1.0}, {fn: b}]", "data: give a `weight` to every training source or to none"),
        ("data.test=[{fn: a, weight: 1.0}]", "data: `weight` mixes training sources; validation and test sources are"),
        ("data={train: [{fn: a}, {fn: b}], streaming: {}}", "data: with `streaming`, several training sources need a"),
        ("rewards.terms=[]", "rewards.terms: needs at least one entry"),
        ("rewards.terms.0.fn=3", "rewards.terms.0.fn: must be text, got 3; put quotes around it"),
        ("data.train={fn: x}", "data.train: must be a list, got a mapping; begin each entry with `- `"),
        ("response_format=", "response_format: must be a mapping, got nothing (null); leave the key out to keep the"),
        ("run.name=", "run.name: must be text, got nothing (null)"),
        ("run.name='a/../b'", "run.name: must serve as a file name"),
        ("run=", "run: must be a mapping"),
        ("stages.xl.steps=1", "command line: stages.xl: no such entry; there is 0, 1, cold, rl"),
        ("stages.2.steps=1", "command line: stages.2: no such entry"),
        ("stages." + "9" * 5000 + "=1", "no such entry"),
        ("model.freeze.0=vision", "must be a list"),
        ("run.name.x=1", "command line: run.name: is 'demo', a single value; nothing can be set beneath it"),
        ("run.seed", "command line: 'run.seed' is not an override; write dotted.path=value"),
        ("=1", "is not an override"),
        ("run..seed=1", "is not an override"),
        ("a" + ".a" * 3000 + "=1", "levels deep"),
        ("run.name=@x", "command line: run.name: not valid YAML: found character '@' that cannot start any token; put"),
        ("run.name=[", "command line: run.name: not valid YAML"),
        ("run.name=!foo x", "command line: run.name: the tag !foo means nothing here; remove it"),
        ("run.seed=!!int x", "command line: run.seed: 'x' cannot be read as int"),
        ("run.seed=" + "9" * 5000, "cannot be read as int"),
        ("run.name=!!set {a}", "means nothing here"),
        ('run.name="\\ud800"', "run.name: half of a surrogate pair"),
        ("run.name=\x00", "command line: run.name: not valid YAML: unprintable character"),
    ],
)
def test_a_bad_override_is_refused_by_its_key(tmp_path, override, said):
    assert said in refused(write(tmp_path, SMALL), override)


VISION_RATE = "stages.rl.optimizer.lr_by_component={vision: 1e-5}"
NO_VISION = "stages: stage 'rl' has `optimizer.lr_by_component.vision`, but vision is not trained"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.freeze=[vision]", VISION_RATE], NO_VISION),
        (["stages.rl.freeze=[vision]", VISION_RATE], NO_VISION),
        (["model.lora={targets: [language.mlp, projector.mlp]}", VISION_RATE], NO_VISION),
        (["model.lora={}", "stages.rl.freeze=[vision]"], "has `freeze`, and `model.lora` freezes all weights"),
        (["model.attn_implementation=eager", "stages.rl.shared_prefix=on"], "stage 'rl' has `shared_prefix: on`"),
    ],
)
def test_overrides_that_exclude_each_other_are_refused(tmp_path, overrides, said):
    assert said in refused(write(tmp_path, SMALL), *overrides)


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
def test_a_bad_file_is_refused_by_its_line(tmp_path, text, said):
    assert said in refused(write(tmp_path, text))


def test_missing_file_directory_and_binary_are_refused(tmp_path):
    assert "no such file" in refused(tmp_path / "nope.yaml")
    assert "is a directory" in refused(tmp_path)
    assert "not a file name" in refused(Path("a\x00b"))
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


def test_a_bfloat16_model_without_masters_of_its_weights_is_refused(tmp_path):
    path = write(tmp_path, SMALL)
    said = refused(path, "deepspeed.zero_stage=0", "model.dtype=bfloat16")
    assert "deepspeed: zero_stage 0 makes a wrong first update of a bfloat16 model; use zero_stage: 1, or" in said
    for options in (
        ["deepspeed.zero_stage=0", "model.dtype=float32"],
        ["deepspeed.zero_stage=1", "model.dtype=bfloat16"],
    ):
        assert load_config(path, options).config.deepspeed is not None


def test_every_number_refuses_a_huge_value_by_path_and_line(tmp_path):
    numbers, tree = {}, full_tree()
    for path, value in flatten_settings(tree).items():
        # Bounds of a filter are compared with a column of the user's, which may hold any number.
        if re.search(r"\.(args|when|row_filter|points)\b", path):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers[path] = 10**30 if isinstance(value, int) else 1e300
    assert len(numbers) > 120
    for index, path in enumerate(numbers):
        put(tree, path, f"MARK-{index}-")
    text = to_yaml(tree)
    lines = {path: text.split(f"MARK-{index}-")[0].count("\n") + 1 for index, path in enumerate(numbers)}
    for index, huge in enumerate(numbers.values()):
        text = text.replace(f"MARK-{index}-", json.dumps(huge))
    said = refused(write(tmp_path, text)).splitlines()
    for path, line in lines.items():
        start = f"{tmp_path}/c.yaml:{line}: {path}: must be less than"
        assert any(problem.startswith(start) for problem in said), (path, said)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("stages.rl.optimizer.lr=1e12", "stages.1.optimizer.lr: must be less than or equal to 1, got 1000000000000"),
        ("stages.rl.sampling.temperature=1000", "temperature: must be less than or equal to 10, got 1000"),
        ("stages.rl.loss.kl.coef=1e9", "stages.1.loss.kl.coef: must be less than or equal to 1000, got 1000000000"),
        ("stages.rl.loss.log_ratio_clip=100", "log_ratio_clip: must be less than or equal to 88, got 100"),
        ("stages.rl.group_size=10000000", "stages.1.group_size: must be less than or equal to 1000000, got 10000000"),
        ("rewards.terms.0.weight=1e308", "rewards.terms.0.weight: must be less than or equal to 1000000, got 1e+308"),
        ("rewards.terms.0.weight=-1e308", "rewards.terms.0.weight: must be greater than or equal to -1000000, got -1e"),
        ("rewards.timeout_s=1e10", "rewards.timeout_s: must be less than or equal to 31536000, got 10000000000"),
        ("data.media_workers=100000", "data.media_workers: must be less than or equal to 4096, got 100000"),
        (f"run.seed={2**63}", "run.seed: must be less than or equal to 9223372036854775807, got 9223372036854775808"),
        ("stages.rl.optimizer.decay_steps=5", "decay_steps has no effect on a constant rate; set `lr_schedule`"),
        ("stages.rl.optimizer={lr_schedule: linear, decay_steps: 5, warmup_steps: 5}", "must exceed warmup_steps 5"),
        ("stages.rl.loss.kl={coef: 0.1, decay_steps: 5}", "decay_steps has no effect on a constant weight"),
    ],
)
def test_values_beyond_their_bounds_are_refused(tmp_path, setting, said):
    assert said in refused(write(tmp_path, SMALL), setting)
