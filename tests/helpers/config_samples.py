"""Configs and helpers for tests of the config."""

import io
import json
import re
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel
from ruamel.yaml import YAML

from mmrl.config import Config, EvalConfig, load_config
from mmrl.config.schema.stage_checks import AnyStage
from mmrl.types import UserError

SMALL = """\
run: {name: demo}
model:
  from_scratch: {}
data:
  train:
    - fn: mmrl_datasets.generators.scenes:count
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
run: {name: demo, dir: out, seed: 1, cpu_threads: 2}
logging: {rollouts: {every: 5}, trackers: [tensorboard, wandb, mlflow, trackio], project: vlm}
callbacks: [{fn: "c:make", args: {every: 3}}]
model:
  path: null
  freeze: [vision]
  lora: {targets: [language.mlp]}
  gradient_checkpointing: [language]
  from_scratch: {family: qwen3_vl, vision: {num_layers: 1}, language: {num_layers: 1}}
data:
  train: [{fn: "a:b", args: {n: 3, deep: {list: [1, {x: 2}]}}, weight: 1.5, row_filter: {column: pass_rate, high: 0.9}}]
  streaming: {shuffle_buffer_size: 5}
  validation: [{fn: "a:c"}]
  test: [{fn: "a:d", args: {on: true}}]
response_format: {thinking: required}
rewards:
  terms:
    - {fn: "r:x", name: x, weight: 0.5, args: {k: v}, when: {task: [count]}, training_only: true,
       requires: y, fallback: 0.5}
    - {fn: "r:y", name: y, timeout_s: 2.0, transform: {clip: [0.0, 0.9], threshold: 0.5, rescale_to: [-1.0, 1.0]}}
    - {fn: "r:z", name: z, schedule: {points: [[0, 1.0], [10, 0.5]]}}
stages:
  - kind: sft
    name: cold
    steps: 10
    validation: {stop_at_mean_reward: 0.4, every: 5}
    optimizer: {lr_by_component: {language: 1e-5}}
    target_field: response
    rollout_steps: [{kind: tools, tools: [{fn: "t:zoom"}]}]
  - kind: rl
    name: rl
    steps: 20
    validation: {stop_at_mean_reward: 0.9}
    dynamic_sampling: {ranges: [{term: x}], max_rounds: 2}
    replay: {capacity: 64}
    rollout_steps:
      - {kind: generate, partial_rollout_tokens: 8, oversampling: 1.5, max_tokens_per_step: 100}
      - kind: rethink
        correct: [x]
        triggers: [{text: " Wait"}]
        max_attempts_per_group: 3
        temperature: 0.9
        max_kept_per_group: 2
      - {kind: tools, tools: [{fn: "t:zoom", name: zoom, args: {most: 2}}]}
      - {kind: probe, corruption: grey, name: blind}
deepspeed: {zero_stage: 1}
evaluation:
  rollout_steps: [{kind: generate}, {kind: rethink, correct: [x], triggers: [{text: " Wait"}]}]
  benchmarks:
    - {name: testA, benchmark: refcoco, data: [RefCOCO], every: 5, split: testA, subsets: [task], coordinates: norm_1}
    - {name: mathvista, data: [MathVista], responses_per_question: 4, temperature: 1.0}
"""


def models_in(annotation: object) -> list[type[BaseModel]]:
    """Return the sections that a field of this type holds, except in mappings with keys of the user."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is dict:
        return []
    return [model for choice in get_args(annotation) for model in models_in(choice)]


ROOTS = (Config, EvalConfig, *get_args(AnyStage))
"""Sections at which the path of a key may start."""


def has_key(path: str) -> bool:
    """Return True if the schema has this key: `stages[].loss.kl.coef`, `data.train.0.fn`, `evaluation.benchmarks`."""
    models, in_list = list(ROOTS), False
    words = re.sub(r"\[\d*\]", "", path).split(".")
    for word in words:
        fields = [model.model_fields[word] for model in models if word in model.model_fields]
        if not fields and in_list and (word.isdigit() or word != words[-1]):
            in_list = False  # an entry of the list, by its index or name
            continue
        if not fields:
            return False
        if any("dict[" in str(field.annotation) for field in fields):
            return True  # a mapping whose keys are the user's, such as `args`
        models = [model for field in fields for model in models_in(field.annotation)]
        in_list = any("tuple" in str(field.annotation) for field in fields)
    return True


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    """Write a config into a folder and return its path."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path, *overrides: str) -> str:
    """Return the message with which a config is refused."""
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def put(tree: Any, path: str, value: object) -> None:
    """Set the value at a dotted path in nested dicts and lists."""
    *way, last = [int(step) if step.isdecimal() else step for step in path.split(".")]
    inner = tree
    for step in way:
        inner = inner[step]
    inner[last] = value


def to_yaml(tree: object) -> str:
    text = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.dump(tree, text)
    return text.getvalue()


def full_tree() -> dict[str, Any]:
    """FULL with every setting spelled out."""
    return json.loads(Config.model_validate_json(json.dumps(YAML(typ="safe", pure=True).load(FULL))).model_dump_json())
