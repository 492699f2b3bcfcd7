"""Loading: files and command-line overrides become one validated `Config` with the origin of each value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, cast

from pydantic import BaseModel, ValidationError

from mmrl.config.errors import to_problem
from mmrl.config.reader import COMMAND_LINE_ORIGIN, ConfigReader
from mmrl.config.recipes import DATA, find_config
from mmrl.config.schema import Config, EvalConfig, RlStage
from mmrl.config.schema.presets import ALGORITHM_PRESETS, REPLAY_PRESETS, RETHINK_PRESETS, Presets
from mmrl.config.yaml_tree import (
    ConfigNode,
    ConfigProblem,
    KeyPath,
    PlainValue,
    format_path,
    iter_leaves,
    iter_settings,
    merge_nodes,
    set_value,
)
from mmrl.types import FunctionCall, UserError

DEFAULT_ORIGIN = "default"

SchemaT = TypeVar("SchemaT", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A config, with the origins of its settings."""

    config: Config  # the validated config
    tree: ConfigNode = field(repr=False)  # settings as files have them, before overlays, overrides and presets
    tree_files: tuple[Path, ...]  # files of `tree`, the named one first, then those that it extends
    overrides: tuple[str, ...]
    # Origin of each setting by dotted path: `file:line`, `command line`, `default` or a preset.
    origins: Mapping[str, str]
    files: tuple[Path, ...]  # `tree_files`, then the overlays
    data_files: tuple[str, ...]  # PATH of each text `${data}/PATH` in the settings
    warnings: tuple[str, ...]  # valid settings that are probably a mistake: `file:line: dotted.path: what to do`


ConfigSource: TypeAlias = str | Path | Mapping[str, Any] | LoadedConfig
"""A YAML file, its settings as a mapping, or a config that is loaded already."""


def load_config(
    source: ConfigSource, overrides: Sequence[str] = (), *, sections: Sequence[tuple[str, str]] = ()
) -> LoadedConfig:
    """Read a config file or its settings, the files it extends, its overlays, and `key=value` overrides.

    A file may be given by the name of a recipe. Relative paths in settings start from the working directory. A config
    that is loaded already gets the overrides after its own, as if all had been given at once. `sections` are applied
    last: each is an override, after the origin that messages name for it.

    Raises:
        UserError: the config is invalid. Problems of keys and values come all at once, a line each:
            `file:line: dotted.path: problem`.
    """
    check_overrides(overrides)
    reader = ConfigReader()
    match source:
        case LoadedConfig():
            tree, overrides = source.tree, (*source.overrides, *overrides)
            reader.files = list(source.tree_files)
        case Mapping():
            tree = reader.read_settings(source)
        case str() | Path():
            tree = reader.read(find_config(source))
        case _:
            raise UserError(f"a config is a file, a mapping or what load_config returned, not {type(source).__name__}")
    tree_files = tuple(reader.files)
    root = reader.apply_overrides(tree, overrides)
    for origin, section in sections:
        root = reader.apply_override(root, section, origin)
    root, data_files = _resolve_data_folder(root, reader.files[0].parent)
    # Presets come after the overrides: an override may name a preset, and overrides win over its settings.
    root = _apply_presets(root)
    config = _validate(root, Config, reader.problems)
    return LoadedConfig(
        config=config,
        tree=tree,
        tree_files=tree_files,
        overrides=tuple(overrides),
        origins=MappingProxyType(_list_origins(config, root)),
        files=tuple(reader.files),
        data_files=data_files,
        warnings=tuple(_list_warnings(config, root)),
    )


def _list_origins(config: Config, root: ConfigNode) -> dict[str, str]:
    """Return the origin of each setting by its dotted path."""
    origins = {}
    for setting, _ in iter_leaves(config.model_dump(mode="json")):
        node = root.find(setting)
        origins[format_path(setting)] = DEFAULT_ORIGIN if node is None else node.origin
    return origins


def _list_warnings(config: Config, root: ConfigNode) -> list[str]:
    """Return the valid settings that are probably a mistake, as lines with the origin of each."""
    warnings = [*config.list_warnings(), *_list_overruled(config, root)]
    return [str(ConfigProblem(root.find_nearest(path)[0].origin, path, text)) for path, text in warnings]


def check_is_list(name: str, given: object) -> None:
    """Raise a UserError for one function or text in place of a list: text would be read letter by letter."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UserError(f"{name} must be a list, got {given!r:.80}; put it in brackets")


def check_overrides(overrides: object) -> None:
    """Raise a UserError for anything but a list of texts."""
    check_is_list("overrides", overrides)
    for text in cast(Sequence[object], overrides):
        if not isinstance(text, str):
            raise UserError(f'overrides: {text!r:.80} is not text; write it as "run.seed=1"')


def _resolve_data_folder(root: ConfigNode, base_dir: Path) -> tuple[ConfigNode, tuple[str, ...]]:
    """Return the tree with an absolute `data.dir`, and the paths that texts name below `${data}`.

    A relative `data.dir` starts from the working directory on the command line, and from `base_dir` in a file. It
    becomes the media root unless the config names others.
    """
    texts = [value for _, value in iter_leaves(root.plain_value) if isinstance(value, str)]
    names = [text.removeprefix(f"{DATA}/") for text in texts if text.startswith(f"{DATA}/")]
    node = root.find(("data", "dir"))
    if node is not None and isinstance(node.value, str):
        base = Path() if node.origin == COMMAND_LINE_ORIGIN else base_dir
        folder = str((base / Path(node.value).expanduser()).resolve())
        root = set_value(root, ("data", "dir"), ConfigNode(folder, node.origin))
        if root.find(("data", "media_roots")) is None:
            root = set_value(root, ("data", "media_roots"), _to_node([folder], node.origin))
    return root, tuple(dict.fromkeys(names))


@contextmanager
def locate_errors(loaded: LoadedConfig) -> Iterator[None]:
    """Prefix a UserError about a setting, raised in this block, with the setting's file, line and key."""
    try:
        yield
    except UserError as error:
        key = error.key or _find_call(loaded.config, error.call)
        if not any(_is_within(leaf, key) for leaf in loaded.origins):
            raise
        raise UserError(f"{_find_origin(loaded, key)}: {key}: {error}") from error


def _find_origin(loaded: LoadedConfig, key: str) -> str:
    """Return the origin of a setting; if it has its default, that of one beside it, or else the config's file."""
    section = key
    while section:
        for leaf, origin in loaded.origins.items():
            if origin != DEFAULT_ORIGIN and _is_within(leaf, section):
                return origin
        section = section.rpartition(".")[0]
    return str(loaded.files[0])


def _is_within(leaf: str, section: str) -> bool:
    return bool(section) and f"{leaf}.".startswith(f"{section}.")


def _find_call(config: Config, call: FunctionCall | None) -> str:
    """Return the dotted path of the function that `call` names, or of the option in question; empty without one."""
    if call is None:
        return ""
    settings = config.model_dump(mode="json")
    for path, value in iter_leaves(settings):
        if path[-1] not in ("fn", "benchmark") or value != call.fn:
            continue
        owner: Any = settings
        for step in path[:-1]:
            owner = owner[step]
        if owner.get("args", {}) == dict(call.args):
            return format_path((*path[:-1], "args", call.option) if call.option else path)
    return ""


def load_eval_config(base_settings: Mapping[str, Any], origin: str, overrides: Sequence[str]) -> EvalConfig:
    """Merge `key=value` overrides onto the settings of an evaluation, which messages call `origin`, and validate them.

    Raises:
        UserError: a setting is invalid; all problems at once, a line each.
    """
    reader = ConfigReader()
    root = _to_node(dict(base_settings), origin)
    for override in overrides:
        root = reader.apply_override(root, override)
    return _validate(_apply_presets(root), EvalConfig, reader.problems)


def read_flat_settings(path: Path) -> dict[str, PlainValue]:
    """Return the settings of one file by dotted path, without validation, for comparing it with another.

    Raises:
        UserError: the file cannot be read or is not YAML.
    """
    return flatten_settings(ConfigReader().read(path).plain_value)


def flatten_settings(value: PlainValue) -> dict[str, PlainValue]:
    """Return the leaves of nested settings by dotted path."""
    return {format_path(path): leaf for path, leaf in iter_leaves(value)}


def _list_overruled(config: Config, root: ConfigNode) -> Iterator[tuple[KeyPath, str]]:
    """Yield the settings of files that win over an `algorithm` of the command line: the path, and what to do."""
    for index, stage in enumerate(config.stages):
        node = root.find(("stages", index, "algorithm"))
        if not isinstance(stage, RlStage) or node is None or node.origin != COMMAND_LINE_ORIGIN:
            continue
        for setting, preset in iter_settings(_to_node(dict(ALGORITHM_PRESETS[stage.algorithm]), "")):
            path = ("stages", index, *setting)
            own, value = root.find(path), preset.plain_value
            if own is not None and own.origin != COMMAND_LINE_ORIGIN and own.plain_value != value:
                text = f"stays {own.plain_value!r}, since a file sets it; `algorithm: {stage.algorithm}` has {value!r}"
                yield path, f"{text}. To follow the algorithm, set it on the command line, too"


def _apply_presets(root: ConfigNode) -> ConfigNode:
    """Return the tree with every preset filled in. An unknown name stays, for validation to refuse it."""
    step_lists: list[KeyPath] = [("evaluation", "rollout_steps")]
    for stage in _list_entries(root, ("stages",)):
        root = _fill_preset(root, (*stage, "replay"), "preset", REPLAY_PRESETS)
        root = _fill_preset(root, stage, "algorithm", ALGORITHM_PRESETS)
        step_lists.append((*stage, "rollout_steps"))
    for step_list in step_lists:
        for step in _list_entries(root, step_list):
            root = _fill_preset(root, step, "preset", RETHINK_PRESETS)
    return root


def _list_entries(root: ConfigNode, path: KeyPath) -> list[KeyPath]:
    """Return the paths of the entries of the list at `path`; none if there is no list."""
    node = root.find(path)
    return [(*path, index) for index in range(len(node.value))] if node and isinstance(node.value, list) else []


def _fill_preset(root: ConfigNode, path: KeyPath, key: str, presets: Presets) -> ConfigNode:
    """Return the tree with the mapping at `path` merged over the preset that its `key` names, if it names one."""
    section = root.find(path)
    if section is None or not isinstance(section.value, dict) or key not in section.value:
        return root
    # As text, since an invalid value, a list for example, cannot be looked up in a mapping.
    name = str(section.value[key].value)
    if name not in presets:
        return root
    settings = dict(presets[name])
    if "replay" not in section.value:
        # An algorithm's replay settings apply only to stages with a `replay` section: they do not switch replay on.
        settings.pop("replay", None)
    return set_value(root, path, merge_nodes(_to_node(settings, f"{key} {name}"), section))


def _to_node(value: PlainValue, origin: str) -> ConfigNode:
    """Return plain settings as a tree in which everything has one origin."""
    if isinstance(value, dict):
        return ConfigNode({key: _to_node(inner, origin) for key, inner in value.items()}, origin)
    if isinstance(value, list):
        return ConfigNode([_to_node(inner, origin) for inner in value], origin)
    return ConfigNode(value, origin)


def _validate(root: ConfigNode, schema: type[SchemaT], unread: Sequence[ConfigProblem]) -> SchemaT:
    """Return the settings of a tree, with `data.dir`, if it is set, in place of `${data}`.

    Raises:
        UserError: all problems, `unread` those of values not read.
    """
    problems, config = list(unread), None
    # Read as JSON, strict models accept a list for a tuple; as Python objects they would not.
    text, folder = json.dumps(root.plain_value), root.find(("data", "dir"))
    if folder is not None and isinstance(folder.value, str):
        text = text.replace(DATA, json.dumps(folder.value)[1:-1])
    try:
        config = schema.model_validate_json(text)
    except ValidationError as error:
        # A value that could not be read is null in the tree, which would be reported a second time.
        unread_paths = {problem.path for problem in unread}
        for detail in error.errors():
            problem = to_problem(detail, root, schema)
            if problem is not None and problem.path not in unread_paths:
                problems.append(problem)
    if config is None or problems:
        raise UserError("\n".join(map(str, problems)))
    return config
