"""Puts the bundles that `algorithm: NAME` and `preset: NAME` stand for beneath what is said beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mmrl.config.schema.presets import ALGORITHM_PRESETS, RETHINK_PRESETS, PresetSettings, PresetValue
from mmrl.config.schema.replay import REPLAY_PRESETS
from mmrl.config.yaml_tree import ConfigNode, merge_nodes


def apply_presets(root: ConfigNode) -> ConfigNode:
    """The tree with every bundle filled in; names that are none are left for validation to refuse."""
    if not isinstance(root.value, dict):
        return root
    filled = dict(root.value)
    if "stages" in filled:
        filled["stages"] = _map_list_items(filled["stages"], _apply_stage_presets)
    if "evaluation" in filled:
        filled["evaluation"] = _apply_step_presets(filled["evaluation"])
    return ConfigNode(filled, root.origin)


def _apply_stage_presets(stage: ConfigNode) -> ConfigNode:
    if isinstance(stage.value, dict) and "replay" in stage.value:
        replay = _merge_over_preset(stage.value["replay"], "preset", REPLAY_PRESETS)
        stage = ConfigNode({**stage.value, "replay": replay}, stage.origin)
    return _apply_step_presets(_merge_over_preset(stage, "algorithm", ALGORITHM_PRESETS))


def _apply_step_presets(owner: ConfigNode) -> ConfigNode:
    """A stage, or the evaluation, whose steps have their bundles."""
    if not isinstance(owner.value, dict) or "rollout_steps" not in owner.value:
        return owner
    steps = _map_list_items(
        owner.value["rollout_steps"], lambda step: _merge_over_preset(step, "preset", RETHINK_PRESETS)
    )
    return ConfigNode({**owner.value, "rollout_steps": steps}, owner.origin)


def _map_list_items(node: ConfigNode, fill: Callable[[ConfigNode], ConfigNode]) -> ConfigNode:
    return ConfigNode([fill(item) for item in node.value], node.origin) if isinstance(node.value, list) else node


def _merge_over_preset(node: ConfigNode, key: str, bundles: Mapping[Any, PresetSettings]) -> ConfigNode:
    """A mapping on top of the bundle that its `key` names."""
    named = node.value.get(key) if isinstance(node.value, dict) else None
    for name, bundle in bundles.items():
        if named is not None and named.value == name:
            origin = f"{key} {name}"
            return merge_nodes(
                ConfigNode({part: _to_node(settings, origin) for part, settings in bundle.items()}, origin), node
            )
    return node


def _to_node(value: PresetValue, origin: str) -> ConfigNode:
    if isinstance(value, Mapping):
        return ConfigNode({key: _to_node(inner, origin) for key, inner in value.items()}, origin)
    if value is None or isinstance(value, str | int | float):
        return ConfigNode(value, origin)
    return ConfigNode([_to_node(inner, origin) for inner in value], origin)
