"""Configs and small tools that the config tests share."""

import io
import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from mmrl.config import Config, load_config
from mmrl.types import UserError

SMALL = """\
run: {name: demo}
model:
  scratch: {}
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
run: {name: demo, dir: out, seed: 1, threads: 2, keep_rollouts_every: 5}
model:
  path: null
  freeze: [vision]
  lora: {targets: [language.mlp]}
  gradient_checkpointing: [language]
  scratch: {family: qwen3_vl, vision: {depth: 1}, language: {depth: 1}}
data:
  train: [{fn: "a:b", args: {n: 3, deep: {list: [1, {x: 2}]}}, weight: 1.5, keep: {column: pass_rate, high: 0.9}}]
  stream: {buffer: 5}
  validation: [{fn: "a:c"}]
  test: [{fn: "a:d", args: {on: true}}]
answer: {think: required}
rewards:
  terms:
    - {fn: "r:x", name: x, weight: 0.5, args: {k: v}, when: {task: [count]}, train_only: true, gate: y, fallback: 0.5}
    - {fn: "r:y", name: y, deadline_s: 2.0, transform: {clip: [0.0, 0.9], threshold: 0.5, scale: [-1.0, 1.0]}}
    - {fn: "r:z", name: z, schedule: {points: [[0, 1.0], [10, 0.5]]}}
stages:
  - kind: sft
    name: cold
    steps: 10
    validation: {until: 0.4, until_each: 0.1, every: 5}
    optimizer: {lr_by_role: {language: 1e-5}}
    imitate: response
    program: [{kind: tools, tools: [{fn: "t:zoom"}]}]
  - kind: rl
    name: rl
    steps: 20
    validation: {until: 0.9, until_each: 0.5}
    filter: {bands: [{term: x}], rounds: 2}
    replay: {capacity: 64}
    program:
      - {kind: generate, chunk: 8, over_sample: 1.5, token_budget: 100}
      - kind: continue_with
        correct: [x]
        triggers: [{text: " Wait"}]
        attempts_per_group: 3
        temperature: 0.9
        kept_per_group: 2
      - {kind: tools, tools: [{fn: "t:zoom", name: zoom, args: {most: 2}}]}
      - {kind: probe, what: grey, name: blind}
deepspeed: {zero: 1}
evaluation:
  program: [{kind: generate}, {kind: continue_with, correct: [x], triggers: [{text: " Wait"}]}]
  benchmarks:
    - {name: testA, bench: refcoco, data: [RefCOCO], every: 5, split: testA, subsets: [task], frame: norm_1}
    - {name: mathvista, data: [MathVista], samples: 4, temperature: 1.0}
"""


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def put(tree, path, value):
    """The nested dicts and lists with `value` at the dotted path."""
    *way, last = [int(step) if step.isdecimal() else step for step in path.split(".")]
    inner = tree
    for step in way:
        inner = inner[step]
    inner[last] = value


def to_yaml(tree) -> str:
    text = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.dump(tree, text)
    return text.getvalue()


def full_tree() -> dict:
    """FULL with every setting spelled out."""
    return json.loads(Config.model_validate_json(json.dumps(YAML(typ="safe", pure=True).load(FULL))).model_dump_json())
