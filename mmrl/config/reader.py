"""Reading: the files of a config, its overlays and `key=value` overrides become one tree of settings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.config.recipes import find_config
from mmrl.config.yaml_tree import (
    MAX_DEPTH,
    ConfigNode,
    ConfigProblem,
    KeyPath,
    PlainValue,
    format_path,
    iter_settings,
    merge_configs,
    parse_yaml,
    set_value,
)
from mmrl.types import UserError

COMMAND_LINE_ORIGIN = "command line"
SETTINGS_ORIGIN = "config"  # settings that were given as a mapping in Python
MAX_BYTES = 1_000_000  # a larger file was named by mistake
MAX_FILES = 100  # a diamond of `extends` counts a file each time, so that the work stays bounded
_OVERLAY_KEYS = ("overlays", "overlays+")


@dataclass(slots=True)
class ConfigReader:
    """Reads the files and overrides of one config, and collects their problems."""

    files: list[Path] = field(default_factory=list)  # all files read, the one that was named first
    problems: list[ConfigProblem] = field(default_factory=list)  # values that could not be read

    def read(self, path: Path, *, error_prefix: str = "", chain: tuple[Path, ...] = ()) -> ConfigNode:
        """Return a file's tree merged over the files it extends; `chain` holds the files that led here."""
        text = _read_text(path, error_prefix)
        chain_here = (*chain, path.resolve())
        if chain_here[-1] in chain:
            raise UserError(f"{error_prefix}{path} extends itself: {' -> '.join(file.name for file in chain_here)}")
        return self._parse(text, path, lambda line: f"{path}:{line}", error_prefix=error_prefix, chain=chain_here)

    def read_settings(self, settings: Mapping[str, Any]) -> ConfigNode:
        """Return the tree of settings that come from Python, merged over the files that they extend."""
        text = to_json(settings, SETTINGS_ORIGIN)
        # A placeholder, never read: relative paths start from its folder, the working directory.
        path = Path(SETTINGS_ORIGIN)
        return self._parse(text, path, lambda line: SETTINGS_ORIGIN, error_prefix="", chain=())

    def _parse(
        self, text: str, path: Path, format_origin: Callable[[int], str], *, error_prefix: str, chain: tuple[Path, ...]
    ) -> ConfigNode:
        """Return the tree of a document merged over the files that it extends; `format_origin` names its lines."""
        self.files.append(path)
        if len(self.files) > MAX_FILES:
            raise UserError(f"{error_prefix}{path} is one file too many; a config builds on {MAX_FILES} at most")
        root, problems = parse_yaml(text, format_origin)
        self.problems += problems
        if root is None:
            raise UserError(f"{error_prefix}{path} is empty; a config sets run, model, data, rewards and stages")
        if not isinstance(root.value, dict):
            raise UserError(f"{root.origin}: a config is a mapping of `key: value` lines, which this is not")
        own = dict(root.value)
        extends = own.pop("extends", None)
        tree = ConfigNode(own, format_origin(1))
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

    def apply_overrides(self, root: ConfigNode, overrides: Sequence[str]) -> ConfigNode:
        """Return a config with its overlays applied, then the overrides, which may also choose the overlays."""
        of_overlays = [text for text in overrides if text.partition("=")[0].strip() in _OVERLAY_KEYS]
        for override in of_overlays:
            root = self.apply_override(root, override)
        root = self._apply_overlays(root)
        for override in overrides:
            if override not in of_overlays:
                root = self.apply_override(root, override)
        return root

    def _apply_overlays(self, root: ConfigNode) -> ConfigNode:
        """Return a config merged with its `overlays`, then `overlays+`; their names are appended to `run.name`.

        Raises:
            UserError: an overlay cannot be read, names a stage that is not there, or disagrees with another.
        """
        assert isinstance(root.value, dict)
        sections = dict(root.value)
        lists = [sections.pop(key) for key in _OVERLAY_KEYS if key in sections]
        overlays = [file for node in lists for file in _list_files(node, "overlays")]
        merged = ConfigNode(sections, root.origin)
        applied: dict[Path, str] = {}  # origin of each overlay by its file
        before: dict[KeyPath, tuple[str, PlainValue]] = {}  # settings of earlier overlays: name of the overlay, value
        for name, origin in overlays:
            file = self.files[0].parent / name
            path = file if file.suffix and origin != COMMAND_LINE_ORIGIN else find_config(name, "overlays")
            if path.resolve() in applied:
                continue
            applied[path.resolve()] = origin
            overlay = self.read(path, error_prefix=f"{origin}: overlays: ")
            merged = merge_configs(merged, overlay)
            settings = dict(iter_settings(merged))
            if conflict := _find_conflict(settings, name, before):
                raise UserError(f"{origin}: overlays: {conflict}; use one, or try the other order")
            # A merge takes over the nodes of the overlay themselves; nodes of a copied stage are not among them.
            own_nodes = {id(node) for _, node in iter_settings(overlay)}
            before |= {setting: (name, node.plain_value) for setting, node in settings.items() if id(node) in own_nodes}
        return _append_to_run_name(merged, applied)

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


def _find_conflict(now: dict[KeyPath, ConfigNode], name: str, before: dict[KeyPath, tuple[str, PlainValue]]) -> str:
    """Return which setting of an earlier overlay the one called `name` has changed, as a clause; empty if none."""
    for path, (earlier, value) in before.items():
        new_value = now[path].plain_value if path in now else None
        if new_value != value:
            return f"{earlier} sets {format_path(path)} to {value!r} and {name} to {new_value!r}"
    return ""


def _append_to_run_name(root: ConfigNode, overlays: Mapping[Path, str]) -> ConfigNode:
    """Return the config with the names of its overlays, files with their origins, at the end of `run.name`."""
    run_name = root.find(("run", "name"))
    if not overlays or run_name is None:
        return root
    name = "-".join([str(run_name.value), *(path.stem for path in overlays)])
    return set_value(root, ("run", "name"), ConfigNode(name, list(overlays.values())[-1]))


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


def to_json(settings: object, origin: str) -> str:
    """Return settings that come from Python as JSON, with paths as texts.

    Raises:
        UserError: they hold something else.
    """
    try:
        return json.dumps(settings, default=os.fspath)
    except (TypeError, ValueError) as error:
        raise UserError(f"{origin}: settings are text, numbers, lists and mappings: {error}") from error
