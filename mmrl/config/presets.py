"""Puts the bundles that `algorithm: NAME` and `preset: NAME` stand for beneath what is said beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mmrl.config.schema.presets import PRESETS, RETHINKING, Setting, Settings
from mmrl.config.schema.replay import REPLAY_PRESETS
from mmrl.config.yaml_tree import Node, merge


def expand(root: Node) -> Node:
    """The tree with every bundle filled in; names that are none are left for validation to refuse."""
    if not isinstance(root.value, dict):
        return root
    filled = dict(root.value)
    if "stages" in filled:
        filled["stages"] = _each(filled["stages"], _stage)
    if "evaluation" in filled:
        filled["evaluation"] = _program(filled["evaluation"])
    return Node(filled, root.origin)


def _stage(stage: Node) -> Node:
    if isinstance(stage.value, dict) and "replay" in stage.value:
        replay = _beneath(stage.value["replay"], "preset", REPLAY_PRESETS)
        stage = Node({**stage.value, "replay": replay}, stage.origin)
    return _program(_beneath(stage, "algorithm", PRESETS))


def _program(owner: Node) -> Node:
    """A stage, or the evaluation, whose steps have their bundles."""
    if not isinstance(owner.value, dict) or "program" not in owner.value:
        return owner
    steps = _each(owner.value["program"], lambda step: _beneath(step, "preset", RETHINKING))
    return Node({**owner.value, "program": steps}, owner.origin)


def _each(node: Node, fill: Callable[[Node], Node]) -> Node:
    return Node([fill(item) for item in node.value], node.origin) if isinstance(node.value, list) else node


def _beneath(node: Node, key: str, bundles: Mapping[Any, Settings]) -> Node:
    """A mapping on top of the bundle that its `key` names."""
    named = node.value.get(key) if isinstance(node.value, dict) else None
    for name, bundle in bundles.items():
        if named is not None and named.value == name:
            origin = f"{key} {name}"
            return merge(Node({part: _node(settings, origin) for part, settings in bundle.items()}, origin), node)
    return node


def _node(value: Setting, origin: str) -> Node:
    if isinstance(value, Mapping):
        return Node({key: _node(inner, origin) for key, inner in value.items()}, origin)
    if value is None or isinstance(value, str | int | float):
        return Node(value, origin)
    return Node([_node(inner, origin) for inner in value], origin)
