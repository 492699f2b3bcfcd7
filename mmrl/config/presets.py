"""Fills in the settings that `algorithm: NAME` and `preset: NAME` stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mmrl.config.schema.presets import ALGORITHM_PRESETS, RETHINK_PRESETS, PresetSettings, PresetValue
from mmrl.config.schema.replay import REPLAY_PRESETS
from mmrl.config.yaml_tree import ConfigNode, merge_nodes


def apply_presets(root: ConfigNode) -> ConfigNode:
    """Return the tree with every preset filled in. An unknown name stays, for validation to refuse it."""
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
    """Return a stage, or the evaluation, with the presets of its rollout steps filled in."""
    if not isinstance(owner.value, dict) or "rollout_steps" not in owner.value:
        return owner
    steps = _map_list_items(owner.value["rollout_steps"], _apply_rethink_preset)
    return ConfigNode({**owner.value, "rollout_steps": steps}, owner.origin)


def _apply_rethink_preset(step: ConfigNode) -> ConfigNode:
    return _merge_over_preset(step, "preset", RETHINK_PRESETS)


def _map_list_items(node: ConfigNode, fill: Callable[[ConfigNode], ConfigNode]) -> ConfigNode:
    return ConfigNode(list(map(fill, node.value)), node.origin) if isinstance(node.value, list) else node


def _merge_over_preset(node: ConfigNode, key: str, presets: Mapping[Any, PresetSettings]) -> ConfigNode:
    """Return a mapping merged over the preset that its `key` names."""
    if not isinstance(node.value, dict) or key not in node.value:
        return node
    # Compared one by one: an invalid value, a list for example, cannot be looked up in a mapping.
    for name, settings in presets.items():
        if node.value[key].value == name:
            return merge_nodes(_to_node(settings, f"{key} {name}"), node)
    return node


def _to_node(value: PresetValue, origin: str) -> ConfigNode:
    if isinstance(value, Mapping):
        return ConfigNode({key: _to_node(inner, origin) for key, inner in value.items()}, origin)
    if value is None or isinstance(value, str | int | float):
        return ConfigNode(value, origin)
    return ConfigNode([_to_node(inner, origin) for inner in value], origin)
