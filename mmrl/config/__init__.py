"""Config files: a strict schema, a loader that reports every problem with its line, and `explain`."""

from mmrl.config.diff import SettingChange, diff_configs
from mmrl.config.explain import explain
from mmrl.config.export import config_json_schema, dump_yaml
from mmrl.config.load import (
    LoadedConfig,
    cap_steps,
    flatten_settings,
    load_config,
    load_eval_config,
    read_flat_settings,
)
from mmrl.config.schema import Config, EvalConfig

__all__ = [
    "Config",
    "EvalConfig",
    "LoadedConfig",
    "SettingChange",
    "cap_steps",
    "config_json_schema",
    "diff_configs",
    "dump_yaml",
    "explain",
    "flatten_settings",
    "load_config",
    "load_eval_config",
    "read_flat_settings",
]
