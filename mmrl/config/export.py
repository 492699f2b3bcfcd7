"""Export of a config as YAML, for the run directory, and of the schema as JSON Schema, for editors."""

from __future__ import annotations

import json
from functools import lru_cache
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from mmrl.config.schema import Config


class _Representer(SafeRepresenter):
    """Keeps the order of keys, writes no anchors, and quotes text that plain YAML would not keep."""

    sort_base_mapping_type_on_output = False

    def ignore_aliases(self, data: object) -> bool:
        """Return True, so that equal values are written twice rather than as an anchor and an alias."""
        return True

    def represent_text(self, data: str) -> ScalarNode:
        """Represent text, with line breaks of any kind and control characters escaped."""
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')

    yaml_representers = {**SafeRepresenter.yaml_representers, str: represent_text}  # noqa: RUF012


def dump_yaml(config: Config) -> str:
    """Return every setting as YAML that loads back to an equal config."""
    return _json_as_yaml(json.dumps(config.model_dump(mode="json")))


# A run writes its config in five places, and writing YAML takes 50 ms.
@lru_cache(maxsize=2)
def _json_as_yaml(content: str) -> str:
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.width = 100
    text = StringIO()
    yaml.dump(json.loads(content), text)
    return text.getvalue()


def config_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a config file; a file with `extends` may leave out required keys."""
    schema = Config.model_json_schema()
    # A key is required only in a file without `extends`: otherwise the files that it extends may set it.
    required = schema.pop("required")
    names = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    over = "Files that this one builds on, relative to it, or names of recipes. Later ones win, and this one over all."
    schema["properties"] = {
        "extends": {**names, "description": over},
        "overlays": {
            **names,
            "description": "Overlays that are laid over this config: names, or files relative to it.",
        },
        **schema["properties"],
    }
    # A file with `extends` may change entries of these lists by name.
    rewards = schema["$defs"]["RewardsConfig"]["properties"]
    for owner, key in ((schema["properties"], "stages"), (rewards, "terms"), (rewards, "group_rewards")):
        listed = owner[key]
        about = {name: listed.pop(name) for name in ("description", "default", "title") if name in listed}
        owner[key] = {**about, "anyOf": [listed, {"type": "object"}]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "if": {"not": {"required": ["extends"]}},
        "then": {"required": required},
    }
