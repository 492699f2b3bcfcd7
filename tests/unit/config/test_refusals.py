"""Configs that are refused: by key, by line of the file, and by type."""

import json
import re
from pathlib import Path

import pytest
from config_samples import SMALL, full_tree, models_in, put, refused, to_yaml, write

from mmrl.config import Config, flatten_settings, load_config, load_eval_config
from mmrl.types import UserError

WRONG = {
    int: ["3", 1.5, True, [1], {"a": 1}, None],
    float: ["0.5", True, [1.0], {"a": 1}, None],
    bool: ["yes", 1, [True], {"a": 1}, None],
    str: [3, True, [1], {"a": 1}],
    list: ["x", 3, {"a": 1}, None],
    dict: ["x", 3, [1], None],
}


def allows_null(path: str) -> bool:
    """Return True if the key at this path may be null."""
    models = [Config]
    for step in path.split("."):
        fields = [model.model_fields[step] for model in models if step in model.model_fields]
        if fields:
            models = [model for field in fields for model in models_in(field.annotation)]
    return any("None" in str(field.annotation) for field in fields)


def problems_with(folder: Path, values: dict[str, object]) -> tuple[list[str], dict[str, str]]:
    """Return the problems of FULL with other values, and how that of each path has to begin: `file:line: path`."""
    tree = full_tree()
    for index, path in enumerate(values):
        put(tree, path, f"MARK-{index}-")
    text = to_yaml(tree)
    beginnings = {}
    for index, path in enumerate(values):
        line = text.split(f"MARK-{index}-")[0].count("\n") + 1
        beginnings[path] = f"{folder}/c.yaml:{line}: {path}"
    for index, value in enumerate(values.values()):
        text = text.replace(f"MARK-{index}-", json.dumps(value))
    return refused(write(folder, text)).splitlines(), beginnings


@pytest.mark.parametrize("turn", range(6))
def test_every_setting_refuses_a_wrong_type_by_path_and_line(tmp_path, turn):
    wrong = {}
    for path, value in flatten_settings(full_tree()).items():
        if re.search(r"\.(args|when)|\.kind$", path) or value is None:
            continue
        choices = [choice for choice in WRONG[type(value)] if choice is not None or not allows_null(path)]
        # A mapping is read as a function of the user's, which lacks one key and has an unknown one.
        if path in ("rollout.engine", "stages.1.loss.policy_loss"):
            choices = [choice for choice in choices if not isinstance(choice, dict)]
        wrong[path] = choices[turn % len(choices)]
    problems, beginnings = problems_with(tmp_path, wrong)
    assert len(problems) == len(wrong) > 80
    for path, beginning in beginnings.items():
        assert any(problem.startswith(beginning) for problem in problems), (path, wrong[path])


def test_every_number_refuses_a_huge_value_by_path_and_line(tmp_path):
    huge = {}
    for path, value in flatten_settings(full_tree()).items():
        # Bounds of a filter are compared with a column of the user's, which may hold any number.
        if type(value) in (int, float) and not re.search(r"\.(args|when|row_filter|points)\b", path):
            huge[path] = 10**30 if isinstance(value, int) else 1e300
    assert len(huge) > 120
    problems, beginnings = problems_with(tmp_path, huge)
    for path, beginning in beginnings.items():
        assert any(problem.startswith(f"{beginning}: must be less than") for problem in problems), (path, problems)


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
        ("extends=x.yaml", "command line: extends: unknown key"),
        ("stages.rl.steps='3'", "stages.1.steps: must be a whole number, got the text '3'; remove the quotes"),
        ("stages.rl.steps=3.0", "stages.1.steps: must be a whole number, got 3.0; write 3"),
        ("stages.rl.steps=1e300", "stages.1.steps: must be a whole number, got 1e+300"),
        ("stages.rl.steps=0", "stages.1.steps: must be greater than or equal"),
        ("stages.rl.steps=", "got nothing (null); leave the key out"),
        ("stages.rl.group_size=1", "stages.1: group_size 1 leaves a group nothing"),
        ("stages.rl={kind: rl, name: rl, steps: 1, group_size: 1, advantage: {baseline: none}}", "nothing to compare"),
        ("stages.rl.num_mini_batches=17", "stages.1: num_mini_batches 17 leaves some without a"),
        ("stages.rl.algorithm=gsop", "got the text 'gsop'; did you mean 'gspo'?"),
        ("stages.rl.algorithm=[gspo]", "stages.1.algorithm: must be 'grpo', "),
        ("stages.rl.loss.kl={coef: 0.1, estimator: k1}", "stages.1.loss.kl: the gradient of k1"),
        ("stages.rl.loss.rollout_correction.method=mask", "stages.1.loss: rollout_correction 'mask' needs"),
        ("stages.rl.loss.rollout_correction={low: 3}", "stages.1.loss.rollout_correction: low 3.0 must be below high"),
        ("stages.rl.loss={policy_loss: cispo, dual_clip: 3}", "stages.1.loss: dual_clip bounds the clipped policy"),
        ("stages.rl.loss={policy_loss: {fn: a:b}, clip_low: 0.1}", "so `clip_low: 0.1` would have no effect; take"),
        ("stages.rl.loss={policy_loss: {fn: a:b}, clip_high: 0.28}", "so `clip_high: 0.28` would have no effect"),
        ("stages.rl.loss.sft_loss.coef=0.1", "stages.1: `loss.sft_loss` with `on: after_rethink` trains on"),
        ("stages.rl.loss.fixed_length=9", "stages.1.loss: fixed_length is for `aggregation: fixed`, not"),
        ("stages.rl.reference.update=ema", "stages.1: reference.update 'ema' has no effect without"),
        ("stages.rl.reference.update=reset", "stages.1.reference: a reference reset every step is"),
        ("stages.rl.reference.update_every=200", "stages.1.reference: update_every has no effect on a frozen"),
        ("stages.rl.reference={update: reset, update_every: 2, ema_decay: 0.5}", "ema_decay is for `update: ema`, not"),
        ("stages.rl.reference.reset_optimizer=true", "stages.1.reference: reset_optimizer is for `update: reset`"),
        ("stages.rl.advantage.difficulty_weight={}", "stages.1.advantage.difficulty_weight.term: missing"),
        ("stages.rl.sampling.temperature=0", "stages.1: temperature 0 makes all rollouts of"),
        ("stages.rl.replay.resample_fresh=true", "stages.1.replay: `resample_fresh` draws with replacement, which"),
        ("stages.rl.dynamic_sampling={}", "stages.1.dynamic_sampling: without `ranges` or `max_truncated_frac` every"),
        ("stages.rl.dynamic_sampling={ranges: [{term: x, low: 2}]}", "stages.1.dynamic_sampling.ranges.0: low 2.0"),
        ("stages.rl.dynamic_sampling={ranges: [{term: x}], extra: carry}", "dynamic_sampling: `extra: carry` needs"),
        ("data.train.0.row_filter={low: 0.1}", "data.train.0.row_filter.column: missing; column of the rows' `meta`"),
        ("data.train.0.row_filter={column: p, low: 2, high: 1}", "data.train.0.row_filter: low 2.0 must not exceed"),
        ("stages.rl.kind=grpo", "stages.1.kind: must be 'sft', 'rl', 'sample' or 'select'"),
        ("stages.rl.name=cold", "stages: two stages are named 'cold'"),
        ("stages.rl.name=a/b", "stages.1.name: must serve as a file name"),
        ("stages.rl={}", "stages.1.kind: missing; write one of 'sft', 'rl',"),
        ("stages.rl=3", "stages.1: must be a mapping, got 3"),
        ("stages=[]", "stages: needs at least one entry"),
        ("stages.rl.optimizer.betas=[0.9]", "stages.1.optimizer.betas: needs 2 values, got 1"),
        ("stages.rl.optimizer.betas=[0.9, 1, 2]", "stages.1.optimizer.betas: needs 2 values, got 3"),
        ("stages.rl.optimizer.betas=[0.9, 1]", "stages.1.optimizer.betas.1: must be less than 1"),
        ("stages.rl.optimizer.lr=1e999", "stages.1.optimizer.lr: 1e999 is not a finite number"),
        ("rewards.terms.0.weight=-1e308", "rewards.terms.0.weight: must be greater than or equal"),
        ("stages.rl.optimizer.final_lr_frac=0.1", "final_lr_frac has no effect on a constant rate"),
        ("stages.rl.loss.sft_loss={coef: 0.1, final_frac: 0.5}", "final_frac has no effect on a constant weight"),
        ("stages.rl.optimizer.decay_steps=5", "decay_steps has no effect on a constant rate"),
        ("stages.rl.optimizer={lr_schedule: linear, decay_steps: 5, warmup_steps: 5}", "must exceed warmup_steps 5"),
        ("stages.rl.loss.kl={coef: 0.1, decay_steps: 5}", "decay_steps has no effect on a constant weight"),
        ("model.freeze=vision", "model.freeze: must be a list, got the text 'vision'; write [vision]"),
        ("model.freeze=[vision, projector, language]", "model: `freeze` holds every component"),
        ("model={from_scratch: {}, freeze: [vision], lora: {targets: [vision.mlp]}}", "model: `lora` targets vision"),
        ("stages.rl.freeze=[vision, projector, language]", "stages: stage 'rl': `freeze` holds all"),
        ("model.dtype=float16", "model.dtype: must be 'float32' or 'bfloat16', got the text 'float16'; did you mean"),
        ("model.path=x", "model: set exactly one of `path`"),
        ("model.min_pixels=9999999", "model: min_pixels 9999999 exceeds max_pixels"),
        ("model.from_scratch.language.num_heads=5", "model.from_scratch.language: hidden_size 96 must be a multiple"),
        ("model.from_scratch.vision.num_heads=5", "model.from_scratch.vision: hidden_size 64 must be a multiple"),
        ("model.from_scratch.language.num_kv_heads=3", "model.from_scratch.language: num_heads 4 must be a multiple"),
        ("model.from_scratch.language.experts_per_token=5", "model.from_scratch.language: experts_per_token 5 exceeds"),
        ("rewards.terms.0.when.task=count", "rewards.terms.0.when.task: must be a list, got the"),
        ("rewards.terms.0.schedule={points: [[5, 1], [5, 2]]}", "steps must rise from point to point, got 5, 5"),
        ("rewards={combine: min, terms: [{fn: a:b, weight: 2}]}", "rewards: combine min takes no weights, and"),
        ("rewards={combine: product, terms: [{fn: a:b, weight: -1}]}", "rewards: combine product takes weights as"),
        ("data.train=[{fn: a, weight: 1.0}, {fn: b}]", "data: give a `weight` to every training"),
        ("data.test=[{fn: a, weight: 1.0}]", "data: `weight` mixes training sources"),
        ("data={train: [{fn: a}, {fn: b}], streaming: {}}", "data: with `streaming`, several training sources need"),
        ("rewards.terms.0.requires_above=0.5", "rewards.terms.0: requires_above is the value that a required term"),
        ("stages.rl.data_order={kind: sorted, descending: true}", "data_order: `descending` needs the `column`"),
        ("stages.rl.replay={preset: code, drop_zero_advantage: false}", "stages.1.replay: `resample_fresh` draws by"),
        ("rewards.terms.0.fn=3", "rewards.terms.0.fn: must be text, got 3"),
        ("data.train={fn: x}", "data.train: must be a list, got a mapping; begin each entry with `- `"),
        ("run=", "run: must be a mapping"),
        ("stages.xl.steps=1", "command line: stages.xl: no such entry; there is 0,"),
        ("stages." + "9" * 5000 + "=1", "no such entry"),
        ("model.freeze.0=vision", "must be a list"),
        ("run.name.x=1", "command line: run.name: is 'demo', a single value"),
        ("run.seed", "command line: 'run.seed' is not an override"),
        ("=1", "is not an override"),
        ("a" + ".a" * 3000 + "=1", "levels deep"),
        ("run.name=@x", "command line: run.name: not valid YAML: found character '@'"),
        ("run.name=!foo x", "command line: run.name: the tag !foo means nothing here"),
        ("run.seed=!!int x", "command line: run.seed: 'x' cannot be read as int"),
        ("run.seed=" + "9" * 5000, "cannot be read as int"),
        ("run.name=!!set {a}", "means nothing here"),
        ('run.name="\\ud800"', "run.name: half of a surrogate pair"),
        ("run.name=\x00", "command line: run.name: not valid YAML: unprintable character"),
    ],
)
def test_a_bad_override_is_refused_by_its_key(tmp_path, override, said):
    assert said in refused(write(tmp_path, SMALL), override)


RETHINK = "{kind: rethink, correct: [exact]"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout_steps=[{kind: rethink, correct: [a]}]", "begin with one step of kind"),
        ("rollout_steps=[{kind: generate}, {kind: generate}]", "got generate, generate"),
        ("rollout_steps=[]", "stages.1.rollout_steps: needs at least one entry"),
        ("rollout_steps=[{kind: generate, oversampling: 2}]", "oversampling and max_tokens_per_step need"),
        (f"rollout_steps=[{{kind: generate}}, {RETHINK}}}, {RETHINK}}}]", "two rollout_steps are named 'rethink'"),
        ("rollout_steps=[{kind: generate}, {kind: rethink}]", "stages.1.rollout_steps.1.correct: missing"),
        ("rollout_steps=[{kind: generate}, {kind: think}]", "stages.1.rollout_steps.1.kind: must be 'generate'"),
        (f"rollout_steps=[{{kind: generate}}, {RETHINK}, min_new_tokens: 600}}]", "more than max_new_tokens 512"),
        (f"rollout_steps=[{{kind: generate}}, {RETHINK}, min_free_tokens: 512}}]", "leave 512 of sampling.max_new"),
        (f"rollout_steps=[{{kind: generate}}, {RETHINK}, triggers: [{{text: a, only: correct}}]}}]", "for incorrect"),
        ("rollout_steps=[{kind: generate}, {kind: probe, corruption: gray}]", "stages.1.rollout_steps.1.corruption"),
        ("async_rollouts=1", "stages.1.async_rollouts: must be true or false"),
    ],
)
def test_invalid_rollout_steps_are_refused(tmp_path, override, said):
    assert said in refused(write(tmp_path, SMALL), f"stages.rl.{override}")


BENCHMARK = "evaluation.benchmarks=[{name: a, data: [x]}, {name: b, benchmark: refcoco, data: [y]}]"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("evaluation.rollout_steps=[{kind: generate, partial_rollout_tokens: 8}]", "completes every response"),
        ("evaluation.rollout_steps=[{kind: generate}, {kind: probe, corruption: grey}]", "has no use for it"),
        (f"evaluation.rollout_steps=[{{kind: generate}}, {RETHINK}, keep: correct}}]", "has `keep`"),
        ("evaluation.benchmarks.a.responses_per_question=4", "all 4 responses to a question are the same"),
        ("evaluation.benchmarks.b.coordinates=px_resized", "evaluation.benchmarks.1.coordinates: must be"),
        ("evaluation.benchmarks.b.name=a", "evaluation.benchmarks: two benchmarks are named 'a'"),
        ("checkpoints.best={metric: benchmark/c/accuracy}", "names no benchmark of evaluation.benchmarks"),
        ("response_format={style: boxed, stop_at_answer: true}", "response_format: stop_at_answer needs `style: tags`"),
        ("response_format={stop_strings: ['']}", "response_format: stop_strings has an empty string"),
        ("response_format.answer_tag=think", "two parts of a response are named 'think'"),
    ],
)
def test_an_invalid_evaluation_or_format_is_refused(tmp_path, override, said):
    path = write(tmp_path, SMALL)
    assert load_config(path, [BENCHMARK, "checkpoints.best={metric: benchmark/b/accuracy}"]).config.checkpoints.best
    assert said in refused(path, BENCHMARK, override)


def test_mmrl_eval_takes_no_stages_or_benchmarks_in_its_config():
    with pytest.raises(UserError, match="stages: unknown key; the keys here are "):
        load_eval_config({"model": {"path": "m"}}, "m", ["stages=1"])
    with pytest.raises(UserError, match="evaluation.benchmarks: unknown key"):
        load_eval_config({"model": {"path": "m"}}, "m", ["evaluation.benchmarks=[{name: mathvista, data: [x]}]"])


PARTIAL = "stages.rl.rollout_steps=[{kind: generate, partial_rollout_tokens: 8}]"
VISION_RATE = "stages.rl.optimizer.lr_by_component={vision: 1e-5}"
NO_VISION = "stages: stage 'rl' has `optimizer.lr_by_component.vision`, but vision is not trained"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.freeze=[vision]", VISION_RATE], NO_VISION),
        (["stages.rl.freeze=[vision]", VISION_RATE], NO_VISION),
        (["model.lora={targets: [language.mlp, projector.mlp]}", VISION_RATE], NO_VISION),
        (["model.lora={}", "stages.rl.freeze=[vision]"], "has `freeze`, and `model.lora` freezes all"),
        (["model.attn_implementation=eager", "stages.rl.shared_prefix=on"], "stage 'rl' has `shared_prefix: on`"),
        (["stages.rl.async_rollouts=true", "rollout.engine=vllm"], "rollout.engine vllm takes turns with the"),
        (["stages.rl.async_rollouts=true", "deepspeed={zero_stage: 2}"], "engine hf keeps a whole second model"),
        (["stages.rl.async_rollouts=true", PARTIAL], "one step old at most; take out one of"),
        (["deepspeed.zero_stage=0", "model.dtype=bfloat16"], "deepspeed: zero_stage 0 makes a wrong first"),
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
        ("run: a: b\n", "c.yaml:1: not valid YAML: mapping values"),
        ("a: 1\n---\nb: 2\n", "c.yaml:2: not valid YAML"),
        ("a: *x\n", "c.yaml:1: not valid YAML: found undefined"),
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
        (SMALL + "1: b\n", "c.yaml:17: the key 1 is not text"),
        (SMALL + "? [a]\n: b\n", "is not text"),
        (SMALL + "<<: {a: 1}\n", "c.yaml:17: merge keys (<<) are not read"),
        (SMALL + "extends: 3\n", "c.yaml:17: extends: must be a file"),
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
    assert "embedded null byte" in refused(Path("a\x00b"))
    (tmp_path / "b.yaml").write_bytes(b"run: {name: a}\nx: \xff\n")
    assert "b.yaml:2: not UTF-8 text (byte 0xff)" in refused(tmp_path / "b.yaml")


def test_all_errors_are_listed_one_per_line(tmp_path):
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


@pytest.mark.parametrize(
    "overrides",
    [
        ["deepspeed.zero_stage=0", "model.dtype=float32"],
        ["deepspeed.zero_stage=1", "model.dtype=bfloat16"],
        ["stages.rl.async_rollouts=true", "rollout.engine=vllm_server", "deepspeed.zero_stage=2"],
    ],
)
def test_what_an_engine_or_optimizer_can_do_is_accepted(tmp_path, overrides):
    assert load_config(write(tmp_path, SMALL), overrides).config.deepspeed


TRACKERS = "must be 'tensorboard', 'wandb', 'trackio' or 'mlflow', got"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("logging.trackers=[tensorbord]", f"logging.trackers.0: {TRACKERS} the text 'tensorbord'"),
        ("logging.trackers=[wandb, wandb]", "logging.trackers: two trackers are named 'wandb'; leave one out"),
        ("logging.trackers=[{kind: wandb, api_key: hush}]", f"logging.trackers.0: {TRACKERS} a mapping"),
        ("logging={trackers: [wandb], api_key: hush}", "logging.api_key: unknown key"),
        ("wandb_project=vlm", "the key for it is `logging.project`"),
    ],
)
def test_a_wrong_tracker_is_refused(tmp_path, setting, expected):
    message = refused(write(tmp_path, SMALL), setting)
    assert expected in message
    assert "hush" not in message
