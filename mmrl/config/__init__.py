"""Config files: a strict schema, a loader that reports every problem with its line, and `explain`."""

# `X as X` re-exports X, for the reader and for mypy (PEP 484).
from mmrl.config.diff import SettingChange as SettingChange
from mmrl.config.diff import diff_configs as diff_configs
from mmrl.config.explain import explain as explain
from mmrl.config.export import config_json_schema as config_json_schema
from mmrl.config.export import dump_yaml as dump_yaml
from mmrl.config.load import ConfigSource as ConfigSource
from mmrl.config.load import LoadedConfig as LoadedConfig
from mmrl.config.load import check_is_list as check_is_list
from mmrl.config.load import check_overrides as check_overrides
from mmrl.config.load import flatten_settings as flatten_settings
from mmrl.config.load import load_config as load_config
from mmrl.config.load import load_eval_config as load_eval_config
from mmrl.config.load import locate_errors as locate_errors
from mmrl.config.load import read_flat_settings as read_flat_settings
from mmrl.config.reader import to_json as to_json
from mmrl.config.recipes import check_data_files as check_data_files
from mmrl.config.recipes import find_config as find_config
from mmrl.config.schema import Config as Config
from mmrl.config.schema import EvalConfig as EvalConfig
