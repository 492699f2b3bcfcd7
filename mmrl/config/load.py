"""Loading: files and command-line overrides become one validated `Config` with the origin of each value."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, cast

from pydantic import BaseModel, ValidationError

from mmrl.config.errors import to_problem
from mmrl.config.recipes import DATA, find_config
from mmrl.config.schema import Config, EvalConfig, RlStage, SelectStage
from mmrl.config.schema.presets import ALGORITHM_PRESETS, REPLAY_PRESETS, RETHINK_PRESETS, Presets
from mmrl.config.yaml_tree import (
    MAX_DEPTH,
    ConfigNode,
    ConfigProblem,
    KeyPath,
    PlainValue,
    format_path,
    iter_leaves,
    iter_settings,
    merge_configs,
    merge_nodes,
    parse_yaml,
    set_value,
)
from mmrl.types import FunctionCall, UserError

COMMAND_LINE_ORIGIN = "command line"
DEFAULT_ORIGIN = "default"
SETTINGS_ORIGIN = "config"  # settings that were given as a mapping in Python
MAX_BYTES = 1_000_000  # a larger file was named by mistake
MAX_FILES = 100  # a diamond of `extends` counts a file each time, so that the work stays bounded

SchemaT = TypeVar("SchemaT", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A config, with the origins of its settings."""

    config: Config  # the validated config
    tree: ConfigNode = field(repr=False)  # settings as files have them, before overlays, overrides and presets
    tree_files: tuple[Path, ...]  # files of `tree`, the named one first, then those that it extends
    overrides: tuple[str, ...]
    origins: Mapping[str, str]
    """Origin of each setting by dotted path: `file:line`, `command line`, `default` or a preset."""
    files: tuple[Path, ...]  # `tree_files`, then the overlays
    data_files: tuple[str, ...] = ()  # PATH of each text `${data}/PATH` in the settings
    warnings: tuple[str, ...] = ()  # valid settings that are probably a mistake: `file:line: dotted.path: what to do`


ConfigSource: TypeAlias = str | Path | Mapping[str, Any] | LoadedConfig
"""A YAML file, its settings as a mapping, or a config that is loaded already."""


def load_config(
    source: ConfigSource, overrides: Sequence[str] = (), *, sections: Sequence[tuple[str, str]] = ()
) -> LoadedConfig:
    """Read a config file or its settings, the files it extends, its overlays, and `key=value` overrides.

    A file may be given by the name of a recipe. Relative paths in settings start from the working directory. A config
    that is loaded already gets the overrides after its own, as if all had been given at once. `sections` are pairs of
    an origin, for messages, and an override that comes last.

    Raises:
        UserError: the config is invalid. Problems of keys and values come all at once, a line each:
            `file:line: dotted.path: problem`.
    """
    check_overrides(overrides)
    files = _ConfigFiles()
    match source:
        case LoadedConfig():
            tree, overrides = source.tree, (*source.overrides, *overrides)
            files.files = list(source.tree_files)
        case Mapping():
            tree = files.read_settings(source)
        case str() | Path():
            tree = files.read(find_config(source))
        case _:
            raise UserError(f"a config is a file, a mapping or what load_config returned, not {type(source).__name__}")
    root, tree_files = tree, tuple(files.files)
    of_overlays = [text for text in overrides if text.partition("=")[0].strip() in ("overlays", "overlays+")]
    for override in of_overlays:
        root = files.apply_override(root, override)
    root = files.lay_overlays(root)
    for override in overrides:
        if override not in of_overlays:
            root = files.apply_override(root, override)
    for origin, section in sections:
        root = files.apply_override(root, section, origin)
    root, data_files = _resolve_data_folder(root, files.files[0].parent)
    # Presets come after the overrides: an override may name a preset, and overrides win over its settings.
    root = _apply_presets(root)
    config = _validate(root, Config, files.problems)
    origins = {}
    for setting, _ in iter_leaves(config.model_dump(mode="json")):
        node = root.find(setting)
        origins[format_path(setting)] = DEFAULT_ORIGIN if node is None else node.origin
    warnings = []
    for key_path, text in (*config.list_warnings(), *_list_overruled(config, root)):
        nearest, _ = root.find_nearest(key_path)
        warnings.append(str(ConfigProblem(nearest.origin, key_path, text)))
    return LoadedConfig(
        config=config,
        tree=tree,
        tree_files=tree_files,
        overrides=tuple(overrides),
        origins=MappingProxyType(origins),
        files=tuple(files.files),
        data_files=data_files,
        warnings=tuple(warnings),
    )


def to_json(settings: object, origin: str) -> str:
    """Return settings that come from Python as JSON, with paths as texts.

    Raises:
        UserError: they hold something else.
    """
    try:
        return json.dumps(settings, default=os.fspath)
    except (TypeError, ValueError) as error:
        raise UserError(f"{origin}: settings are text, numbers, lists and mappings: {error}") from error


def check_is_list(name: str, given: object) -> None:
    """Raise a UserError for one function or text in place of a list: a text would be read letter by letter."""
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
    """Return where somebody wrote a setting, or one beside it if it has its default; at last, the config's file."""
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
    files = _ConfigFiles()
    root = _to_node(dict(base_settings), origin)
    for override in overrides:
        root = files.apply_override(root, override)
    return _validate(_apply_presets(root), EvalConfig, files.problems)


def cap_steps(loaded: LoadedConfig, steps: int) -> LoadedConfig:
    """Return the same run with at most `steps` steps in every stage, for a smoke test.

    Raises:
        UserError: fewer than one step.
    """
    if steps < 1:
        raise UserError(f"{COMMAND_LINE_ORIGIN}: --steps must be at least 1, got {steps}")
    stages = list(loaded.config.stages)
    origins = dict(loaded.origins)
    for index, stage in enumerate(stages):
        if not isinstance(stage, SelectStage) and (stage.steps is None or stage.steps > steps):
            stages[index] = stage.model_copy(update={"steps": steps})
            origins[f"stages.{index}.steps"] = COMMAND_LINE_ORIGIN
    config = loaded.config.model_copy(update={"stages": tuple(stages)})
    return replace(loaded, config=config, origins=MappingProxyType(origins))


def read_flat_settings(path: Path) -> dict[str, PlainValue]:
    """Return the settings of one file by dotted path, without validation, for comparing it with another.

    Raises:
        UserError: the file cannot be read or is not YAML.
    """
    return flatten_settings(_ConfigFiles().read(path).plain_value)


def flatten_settings(value: PlainValue) -> dict[str, PlainValue]:
    """Return the leaves of nested settings by dotted path."""
    return {format_path(path): leaf for path, leaf in iter_leaves(value)}


@dataclass(slots=True)
class _ConfigFiles:
    """Reads the files of one config, and collects their problems."""

    files: list[Path] = field(default_factory=list)
    problems: list[ConfigProblem] = field(default_factory=list)

    def read(self, path: Path, *, error_prefix: str = "", chain: tuple[Path, ...] = ()) -> ConfigNode:
        """Return a file's tree merged over the files it extends; `chain` holds the files that led here."""
        text = _read_text(path, error_prefix)
        chain_here = (*chain, path.resolve())
        if chain_here[-1] in chain:
            raise UserError(f"{error_prefix}{path} extends itself: {' -> '.join(file.name for file in chain_here)}")
        self.files.append(path)
        if len(self.files) > MAX_FILES:
            raise UserError(f"{error_prefix}{path} is one file too many; a config builds on {MAX_FILES} at most")
        root, problems = parse_yaml(text, lambda line: f"{path}:{line}")
        self.problems += problems
        return self._merge_bases(root, f"{path}:1", path, error_prefix=error_prefix, chain=chain_here)

    def read_settings(self, settings: Mapping[str, Any]) -> ConfigNode:
        """Return the tree of settings that come from Python, merged over the files that they extend."""
        text = to_json(settings, SETTINGS_ORIGIN)
        # A placeholder, never read: relative paths start from its folder, the working directory.
        path = Path(SETTINGS_ORIGIN)
        self.files.append(path)
        root, problems = parse_yaml(text, lambda line: SETTINGS_ORIGIN)
        self.problems += problems
        return self._merge_bases(root, SETTINGS_ORIGIN, path, error_prefix="", chain=())

    def _merge_bases(
        self, root: ConfigNode | None, origin: str, path: Path, *, error_prefix: str, chain: tuple[Path, ...]
    ) -> ConfigNode:
        """Return a tree merged over the files that it extends; `origin` is that of the whole tree."""
        if root is None:
            raise UserError(f"{error_prefix}{path} is empty; a config sets run, model, data, rewards and stages")
        if not isinstance(root.value, dict):
            raise UserError(f"{root.origin}: a config is a mapping of `key: value` lines, this is something else")
        own = dict(root.value)
        extends = own.pop("extends", None)
        tree = ConfigNode(own, origin)
        if extends is None:
            return tree
        # Later bases win over earlier ones, and the file itself over all.
        merged = ConfigNode({}, tree.origin)
        for base, base_origin in _list_files(extends, "extends"):
            file = path.parent / base
            base_path = file if file.is_file() or file.suffix else find_config(base)
            base_tree = self.read(base_path, error_prefix=f"{base_origin}: extends: ", chain=chain)
            merged = merge_configs(merged, base_tree)
        return merge_configs(merged, tree)

    def lay_overlays(self, root: ConfigNode) -> ConfigNode:
        """Return a config merged with its `overlays`, then `overlays+`; their names are appended to `run.name`.

        Raises:
            UserError: an overlay cannot be read, names a stage that is not there, or disagrees with another.
        """
        assert isinstance(root.value, dict)
        own, laid, kept = dict(root.value), dict[Path, str](), dict[KeyPath, tuple[PlainValue, str]]()
        lists = [own.pop(key) for key in ("overlays", "overlays+") if key in own]
        merged = ConfigNode(own, root.origin)
        for name, origin in [file for node in lists for file in _list_files(node, "overlays")]:
            file = self.files[0].parent / name
            path = file if file.suffix and origin != COMMAND_LINE_ORIGIN else find_config(name, "overlays")
            if path.resolve() in laid:
                continue
            laid[path.resolve()] = origin
            overlay = self.read(path, error_prefix=f"{origin}: overlays: ")
            merged = merge_configs(merged, overlay)
            settings = dict(iter_settings(merged))
            for setting, (value, other) in kept.items():
                new_value = settings[setting].plain_value if setting in settings else None
                if new_value != value:
                    text = f"{other} sets {format_path(setting)} to {value!r} and {name} to {new_value!r}"
                    raise UserError(f"{origin}: overlays: {text}; use one, or try the other order")
            # A merge takes over the nodes of the overlay themselves; nodes of a copied stage are not among them.
            nodes = {id(node) for _, node in iter_settings(overlay)}
            kept |= {setting: (node.plain_value, name) for setting, node in settings.items() if id(node) in nodes}
        run_name = merged.find(("run", "name"))
        if laid and run_name is not None:
            text = "-".join([str(run_name.value), *(path.stem for path in laid)])
            merged = set_value(merged, ("run", "name"), ConfigNode(text, [*laid.values()][-1]))
        return merged

    def apply_override(self, root: ConfigNode, text: str, origin: str = COMMAND_LINE_ORIGIN) -> ConfigNode:
        """Return the tree with one `dotted.path=value` applied."""
        address, equals, value = text.partition("=")
        keys = address.strip().split(".")
        if not equals or not all(keys):
            raise UserError(
                f"{COMMAND_LINE_ORIGIN}: {text!r} is not an override; write dotted.path=value, such as run.seed=1"
            )
        if len(keys) > MAX_DEPTH:
            raise UserError(f"{COMMAND_LINE_ORIGIN}: {address[:40]}... is more than {MAX_DEPTH} levels deep")
        path = _resolve_path(root, keys)
        node, problems = parse_yaml(value, lambda line: origin, path)
        self.problems += problems
        return set_value(root, path, node or ConfigNode(None, origin))


def _list_files(node: ConfigNode, key: str) -> list[tuple[str, str]]:
    """Return the file names below a key, one or a list of them, with their origins."""
    entries = node.value if isinstance(node.value, list) else [node]
    files = [(entry.value, entry.origin) for entry in entries if isinstance(entry.value, str) and entry.value]
    if len(files) < len(entries):
        raise UserError(f"{node.origin}: {key}: must be a file name or a list of them")
    return files


def _read_text(path: Path, error_prefix: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)  # one byte more shows that the file is too large
    except FileNotFoundError as error:
        raise UserError(f"{error_prefix}{path}: no such file (looked in {Path.cwd()})") from error
    except IsADirectoryError as error:
        raise UserError(f"{error_prefix}{path} is a directory; name the .yaml file in it") from error
    except (OSError, ValueError) as error:  # a ValueError for a null character in the name
        raise UserError(f"{error_prefix}{str(path)!r} cannot be read: {error}") from error
    if len(data) > MAX_BYTES:
        raise UserError(f"{error_prefix}{path} is larger than {MAX_BYTES} bytes; this is not a config")
    try:
        return data.decode("utf-8-sig")  # editors on Windows begin a file with a byte-order mark
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 text (byte {data[error.start]:#04x}); save it as UTF-8") from error


def _resolve_path(root: ConfigNode, keys: Sequence[str]) -> KeyPath:
    """Return the path that keys of an override name: list entries by index or by their `name`."""
    path: KeyPath = ()
    for key in keys:
        node = root.find(path)
        if node is None or node.value is None or isinstance(node.value, dict):
            path = (*path, key)
        elif isinstance(node.value, list):
            path = (*path, _find_list_index(node.value, key, path))
        else:
            text = f"is {node.value!r}, a single value; nothing can be set beneath it"
            raise UserError(str(ConfigProblem(COMMAND_LINE_ORIGIN, path, text)))
    return path


def _find_list_index(items: Sequence[ConfigNode], key: str, path: KeyPath) -> int:
    indices = {str(index): index for index in range(len(items))}
    for index, item in enumerate(items):
        if isinstance(item.value, dict) and "name" in item.value:
            # An index wins over a name, and the first of two equal names over the second.
            indices.setdefault(str(item.value["name"].value), index)
    if key not in indices:
        text = f"no such entry; there is {', '.join(indices)}" if indices else "no such entry; the list is empty"
        raise UserError(str(ConfigProblem(COMMAND_LINE_ORIGIN, (*path, key), text)))
    return indices[key]


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
    apply_to_step = partial(_merge_over_preset, key="preset", presets=RETHINK_PRESETS)
    root = _change(root, ("stages", "*"), _apply_stage_presets)
    root = _change(root, ("stages", "*", "rollout_steps", "*"), apply_to_step)
    return _change(root, ("evaluation", "rollout_steps", "*"), apply_to_step)


def _apply_stage_presets(stage: ConfigNode) -> ConfigNode:
    has_replay = isinstance(stage.value, dict) and "replay" in stage.value
    stage = _change(stage, ("replay",), partial(_merge_over_preset, key="preset", presets=REPLAY_PRESETS))
    stage = _merge_over_preset(stage, "algorithm", ALGORITHM_PRESETS)
    if isinstance(stage.value, dict) and not has_replay:
        # An algorithm's replay settings apply only to stages with a `replay` section: they do not switch replay on.
        stage = ConfigNode({key: node for key, node in stage.value.items() if key != "replay"}, stage.origin)
    return stage


def _change(node: ConfigNode, path: Sequence[str], change: Callable[[ConfigNode], ConfigNode]) -> ConfigNode:
    """Return the tree with `change` applied at a path, if it is there; `*` stands for every entry of a list."""
    if not path:
        return change(node)
    key, rest = path[0], path[1:]
    if key == "*" and isinstance(node.value, list):
        return ConfigNode([_change(entry, rest, change) for entry in node.value], node.origin)
    if isinstance(node.value, dict) and key in node.value:
        return ConfigNode({**node.value, key: _change(node.value[key], rest, change)}, node.origin)
    return node


def _merge_over_preset(node: ConfigNode, key: str, presets: Presets) -> ConfigNode:
    """Return a mapping merged over the preset that its `key` names."""
    if not isinstance(node.value, dict) or key not in node.value:
        return node
    # As text, since an invalid value, a list for example, cannot be looked up in a mapping.
    name = str(node.value[key].value)
    return merge_nodes(_to_node(dict(presets[name]), f"{key} {name}"), node) if name in presets else node


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
