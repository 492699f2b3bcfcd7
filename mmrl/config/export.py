"""A config as text for others: YAML for the run directory, JSON Schema for editors."""

from __future__ import annotations

from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from mmrl.config.schema import Config


class _Representer(SafeRepresenter):
    """Keeps the order of keys, writes everything in place, and quotes text that plain YAML would not keep."""

    sort_base_mapping_type_on_output = False

    def ignore_aliases(self, data: object) -> bool:
        """No anchors: equal values are written twice."""
        return True

    def represent_text(self, data: str) -> ScalarNode:
        """Text; line breaks of any kind and control characters are escaped."""
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')

    yaml_representers = {**SafeRepresenter.yaml_representers, str: represent_text}  # noqa: RUF012


def dump_yaml(config: Config) -> str:
    """Every setting as YAML that loads back to an equal config."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.width = 100
    text = StringIO()
    yaml.dump(config.model_dump(mode="json"), text)
    return text.getvalue()


def config_json_schema() -> dict[str, Any]:
    """The JSON Schema of a config file, described by the settings' docstrings; `extends` may supply what is missing."""
    schema = Config.model_json_schema()
    required = schema.pop("required")
    schema["properties"] = {
        "extends": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
            "description": "Files this one builds on, relative to it; later ones and this one win.",
        },
        **schema["properties"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "if": {"not": {"required": ["extends"]}},
        "then": {"required": required},
    }
