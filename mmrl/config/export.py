"""A config as text for others: YAML for the run directory, JSON Schema for editors."""

from __future__ import annotations

from io import StringIO
from typing import Any

from ruamel.yaml import YAML

from mmrl.config.schema import Config


def dump(config: Config) -> str:
    """Every setting as YAML that loads back to an equal config."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.allow_unicode = True
    yaml.width = 100
    yaml.sort_base_mapping_type_on_output = False
    yaml.representer.ignore_aliases = lambda data: True
    text = StringIO()
    yaml.dump(config.model_dump(mode="json"), text)
    return text.getvalue()


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a config file: descriptions are the settings' docstrings; `extends` may supply what is missing."""
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
