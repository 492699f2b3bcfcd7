"""Puts the bundle that `algorithm: NAME` stands for beneath what a stage says itself."""

from __future__ import annotations

from mmrl.config.schema.presets import PRESETS, Settings
from mmrl.config.tree import Node, merge


def expand(root: Node) -> Node:
    """The tree with every stage's bundle filled in; names that are none are left for validation to refuse."""
    stages = root.value.get("stages") if isinstance(root.value, dict) else None
    if not isinstance(root.value, dict) or stages is None or not isinstance(stages.value, list):
        return root
    expanded = Node([_expanded(stage) for stage in stages.value], stages.origin)
    return Node({**root.value, "stages": expanded}, root.origin)


def _expanded(stage: Node) -> Node:
    named = stage.value.get("algorithm") if isinstance(stage.value, dict) else None
    for algorithm, bundle in PRESETS.items():
        if named is not None and named.value == algorithm:
            origin = f"algorithm {algorithm}"
            return merge(Node({part: _node(settings, origin) for part, settings in bundle.items()}, origin), stage)
    return stage


def _node(value: Settings | str | float | bool, origin: str) -> Node:
    if isinstance(value, dict):
        return Node({key: _node(inner, origin) for key, inner in value.items()}, origin)
    return Node(value, origin)
