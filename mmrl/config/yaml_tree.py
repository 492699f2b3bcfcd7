"""YAML 1.2 as a tree of nodes that know the file and line they came from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.nodes import Node as YamlNode
from ruamel.yaml.reader import ReaderError

from mmrl.types import UserError

MAX_DEPTH = 64
# Aliases count each time they are used, so that nested ones cannot multiply without bound.
MAX_NODES = 100_000

_TAG = "tag:yaml.org,2002:"
# YAML 1.2 has no type for dates; the library still tags them, and here they stay text.
_TEXT_TAGS = {f"{_TAG}str", f"{_TAG}timestamp", f"{_TAG}value"}
_VALUE_TAGS = {f"{_TAG}int", f"{_TAG}float", f"{_TAG}bool", f"{_TAG}null"}
_YAML_HINTS = {
    "cannot start any token": "put quotes around the text; indent with spaces, never tabs",
    "mapping values are not allowed": "check the indentation, and put quotes around text that holds `: `",
    "could not find expected ':'": "a key needs a colon and a space after it",
    "another document": "keep one document per file: remove the `---` between them",
    "undefined alias": "define it with & further up, or put quotes around text that begins with *",
}

KeyPath = tuple[str | int, ...]
Scalar = str | int | float | bool | None
PlainValue: TypeAlias = "dict[str, PlainValue] | list[PlainValue] | Scalar"


@dataclass(frozen=True, slots=True)
class ConfigNode:
    """A mapping or list of nodes, or a scalar, with its origin."""

    value: dict[str, ConfigNode] | list[ConfigNode] | Scalar  # nodes, or the scalar itself
    origin: str  # `file:line` or `command line`

    @property
    def plain_value(self) -> PlainValue:
        """The value alone, as nested dicts and lists."""
        if isinstance(self.value, dict):
            return {key: node.plain_value for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain_value for node in self.value]
        return self.value

    def find_nearest(self, path: KeyPath) -> tuple[ConfigNode, int]:
        """Return the deepest node on the way to `path`, and the number of steps of the path that exist."""
        node = self
        for depth, step in enumerate(path):
            match node.value, step:
                case dict() as mapping, str() if step in mapping:
                    node = mapping[step]
                case list() as items, int() if step < len(items):
                    node = items[step]
                case _:
                    return node, depth
        return node, len(path)

    def find(self, path: KeyPath) -> ConfigNode | None:
        """Return the node at `path`, or None if there is none."""
        node, depth = self.find_nearest(path)
        return node if depth == len(path) else None


class ConfigProblem(NamedTuple):
    """A problem of a config."""

    origin: str  # `file:line` or `command line`
    path: KeyPath  # keys and indices from the root; empty for a problem of the whole file
    text: str  # the problem, and what to write instead

    def __str__(self) -> str:
        """Return "origin: dotted.path: text"."""
        return f"{self.origin}: {format_path(self.path)}: {self.text}" if self.path else f"{self.origin}: {self.text}"


def format_path(path: KeyPath) -> str:
    """Return a path as it is written on the command line: `stages.0.steps`."""
    return ".".join(map(str, path))


def merge_nodes(base: ConfigNode, over: ConfigNode) -> ConfigNode:
    """Merge `over` onto `base`: mappings key by key, anything else is replaced."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, node in over.value.items():
        merged[key] = merge_nodes(merged[key], node) if key in merged else node
    return ConfigNode(merged, over.origin)


STEPS: Final[KeyPath] = ("rollout_steps",)
NAMED_LISTS: Final = {
    ("stages",): "kind",
    STEPS: "kind",
    ("rewards", "terms"): "fn",
    ("rewards", "group_rewards"): "fn",
}
"""Lists of a config or a stage whose entries are merged by name, with the key that marks a new entry."""


def merge_configs(base: ConfigNode, over: ConfigNode) -> ConfigNode:
    """Merge two configs, or two stages. Where `over` has a mapping for a named list, it changes entries by name.

    Raises:
        UserError: `over` names an entry that `base` does not have.
    """
    merged = merge_nodes(base, over)
    for path in NAMED_LISTS:
        changes = over.find(path)
        if changes is not None and isinstance(changes.value, dict):
            # A stage without steps of its own has the default one.
            default_step = ConfigNode({"kind": ConfigNode("generate", changes.origin)}, changes.origin)
            entries = [default_step] if path == STEPS else []
            old_list = base.find(path)
            if old_list is not None and isinstance(old_list.value, list):
                entries = old_list.value
            changed = _change_entries(path, entries, changes.value)
            merged = set_value(merged, path, ConfigNode(changed, changes.origin))
    return merged


def set_value(node: ConfigNode, path: KeyPath, value: ConfigNode) -> ConfigNode:
    """Return the tree with a node at a path; mappings that are missing on the way are made."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(node.value, list) and isinstance(key, int):
        items = list(node.value)
        items[key] = set_value(items[key], rest, value)
        return ConfigNode(items, node.origin)
    mapping = dict(node.value) if isinstance(node.value, dict) else {}
    mapping[str(key)] = set_value(mapping.get(str(key), ConfigNode(None, value.origin)), rest, value)
    return ConfigNode(mapping, node.origin)


def _change_entries(path: KeyPath, entries: list[ConfigNode], changes: dict[str, ConfigNode]) -> list[ConfigNode]:
    """Return the entries of the named list at `path` after `changes`, which are applied in order.

    The key of a change is the name of an entry, or `kind:KIND` for all entries of a kind. Its settings are merged onto
    these entries; null removes them. A new name adds an entry: before the entries that the next key changes, if there
    is a next key, else at the end.
    """
    merged = list(entries)
    new: list[ConfigNode] = []  # new entries, until the next key of old ones gives them a place
    for key, change in changes.items():
        if _adds_entry(path, merged, key, change):
            new.append(_make_entry(path, merged, key, change))
            continue
        indices = _find_entries(path, merged, key, change.origin)
        for index in indices:
            old_kind, kind = _child(merged[index], "kind"), _child(change, "kind")
            if kind not in (None, old_kind):
                # The settings that stay are of the old kind, and would be refused one by one.
                raise UserError(f"{change.origin}: {format_path(path)}: {key!r} is of kind {old_kind}, not {kind}")
            merged[index] = merge_configs(merged[index], change)
        merged = merged[: indices[0]] + new + merged[indices[0] :]
        merged = [entry for entry in merged if entry.value is not None]
        new = []
    return merged + new


def _adds_entry(path: KeyPath, entries: Sequence[ConfigNode], key: str, change: ConfigNode) -> bool:
    """Return True for a new name with `copy_of` or the list's key in `NAMED_LISTS` among its settings."""
    is_known = key in [_child(entry, "name") for entry in entries]
    marks = (NAMED_LISTS[path], "copy_of")
    return not is_known and isinstance(change.value, dict) and any(mark in change.value for mark in marks)


def _make_entry(path: KeyPath, entries: Sequence[ConfigNode], name: str, change: ConfigNode) -> ConfigNode:
    """Return a new entry; with `copy_of` it starts as a copy of the first entry of that name."""
    assert isinstance(change.value, dict)
    settings = dict(change.value)
    copied = settings.pop("copy_of", None)
    entry = ConfigNode({"name": ConfigNode(name, change.origin), **settings}, change.origin)
    if copied is None:
        return entry
    index = _find_entries(path, entries, str(copied.value), copied.origin)[0]
    return merge_configs(entries[index], entry)


def _find_entries(path: KeyPath, entries: Sequence[ConfigNode], key: str, origin: str) -> list[int]:
    """Return the indices of the entries that a key names, or of a kind by `kind:KIND`; UserError if there is none."""
    by, wanted = ("kind", key.removeprefix("kind:")) if key.startswith("kind:") else ("name", key)
    found = [index for index, entry in enumerate(entries) if _child(entry, by) == wanted]
    if not found:
        about = NAMED_LISTS[path]
        there = ", ".join(f"{_child(entry, 'name') or 'unnamed'} ({_child(entry, about)})" for entry in entries)
        raise UserError(f"{origin}: {format_path(path)}: there is no {key!r} to change; there are {there}")
    return found


def _child(node: ConfigNode, key: str) -> object:
    """Return the value below a key of a mapping; None without it."""
    return node.value[key].value if isinstance(node.value, dict) and key in node.value else None


def iter_leaves(value: PlainValue, path: KeyPath = ()) -> Iterator[tuple[KeyPath, PlainValue]]:
    """Yield the settings of nested dicts and lists by path: scalars, empty containers and lists of scalars."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from iter_leaves(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, inner in enumerate(value):
            yield from iter_leaves(inner, (*path, index))
    else:
        yield path, value


def iter_settings(node: ConfigNode, path: KeyPath = ()) -> Iterator[tuple[KeyPath, ConfigNode]]:
    """Yield what a merge replaces as a whole, by path: scalars and lists. Entries of named lists go by their names."""
    inner = node.value
    if isinstance(inner, list) and (path in NAMED_LISTS or path[2:] == STEPS):
        if path[2:] == STEPS:
            yield path, node  # an overlay may replace the list, or change its entries
        inner = {str(_child(entry, "name") or index): entry for index, entry in enumerate(inner)}
    if not isinstance(inner, dict):
        yield path, node
        return
    for key, entry in inner.items():
        yield from iter_settings(entry, (*path, key))


def parse_yaml(
    document: str, format_origin: Callable[[int], str], base_path: KeyPath = ()
) -> tuple[ConfigNode | None, list[ConfigProblem]]:
    """Return the root of a YAML document, None if it is empty, and the problems found.

    `format_origin` names a line, counted from 1; `base_path` is the path of the root in the config.

    Raises:
        UserError: the document is not YAML, nested too deeply, or too large once aliases are expanded.
    """
    reader = _NodeReader(format_origin)
    try:
        root = reader.yaml.compose(document)
        if root is None:
            return None, reader.problems
        tree = reader.read(root, base_path, format_origin(root.start_mark.line + 1))
        return tree, reader.problems
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        hints = [hint for phrase, hint in _YAML_HINTS.items() if phrase in str(error)]
        text = "; ".join([f"not valid YAML: {error.problem or error.context or 'unreadable'}", *hints])
        cause: Exception = error
    except ReaderError as error:
        # This error has no mark, only the position of the character.
        line = document.count("\n", 0, error.position) + 1
        text, cause = f"not valid YAML: unprintable character {error.character!r}", error
    except YAMLError as error:
        line, text, cause = 1, f"not valid YAML: {error}", error
    except RecursionError as error:
        # The library composes recursively, and gives up before `_NodeReader` counts levels.
        line, text, cause = 1, f"nested more than {MAX_DEPTH} levels deep", error
    raise UserError(str(ConfigProblem(format_origin(line), base_path, text))) from cause


@dataclass(slots=True)
class _NodeReader:
    """Turns composed YAML into nodes, and collects problems on the way."""

    format_origin: Callable[[int], str]
    yaml: YAML = field(default_factory=lambda: YAML(typ="safe", pure=True))
    problems: list[ConfigProblem] = field(default_factory=list)
    num_nodes: int = 0

    def read(self, node: YamlNode, path: KeyPath, origin: str) -> ConfigNode:
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES or len(path) > MAX_DEPTH:
            limit = f"{MAX_NODES} values" if self.num_nodes > MAX_NODES else f"{MAX_DEPTH} levels"
            raise UserError(
                str(ConfigProblem(origin, path[:4], f"holds more than {limit}, aliases expanded; this is not a config"))
            )
        if isinstance(node, MappingNode) and node.tag == _TAG + "map":
            return ConfigNode(self._read_mapping(node, path), origin)
        if isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
            items = [self.read(item, (*path, index), self._origin_of(item)) for index, item in enumerate(node.value)]
            return ConfigNode(items, origin)
        if isinstance(node, ScalarNode):
            return ConfigNode(self._read_scalar(node, path, origin), origin)
        self._add_problem(origin, path, f"the tag {node.tag} means nothing here; remove it")
        return ConfigNode(None, origin)

    def _read_mapping(self, node: YamlNode, path: KeyPath) -> dict[str, ConfigNode]:
        mapping: dict[str, ConfigNode] = {}
        for key_node, value_node in node.value:
            origin = self._origin_of(key_node)
            if key_node.tag == _TAG + "merge":
                self._add_problem(origin, path, "merge keys (<<) are not read; use `extends: other.yaml`")
            elif not isinstance(key_node, ScalarNode) or key_node.tag not in _TEXT_TAGS:
                shown = f"{key_node.value} " if isinstance(key_node, ScalarNode) else ""
                self._add_problem(origin, path, f"the key {shown}is not text; put quotes around it")
            else:
                key = self._decode_text(str(key_node.value), path, origin)
                if key in mapping:
                    first = mapping[key].origin
                    self._add_problem(origin, (*path, key), f"set twice, first at {first}; remove one of the two")
                mapping[key] = self.read(value_node, (*path, key), origin)
        return mapping

    def _read_scalar(self, node: YamlNode, path: KeyPath, origin: str) -> Scalar:
        if node.tag in _TEXT_TAGS:
            return self._decode_text(str(node.value), path, origin)
        if node.tag not in _VALUE_TAGS:
            self._add_problem(origin, path, f"the tag {node.tag} means nothing here; remove it")
            return None
        try:
            value: Scalar = self.yaml.constructor.construct_object(node)
        except (ValueError, KeyError):
            # A tag that does not fit its value, or an integer of thousands of digits.
            self._add_problem(origin, path, f"{node.value[:20]!r} cannot be read as {node.tag.removeprefix(_TAG)}")
            return None
        if isinstance(value, float) and not math.isfinite(value):
            self._add_problem(origin, path, f"{node.value} is not a finite number; use one, or leave the key out")
        return value

    def _decode_text(self, text: str, path: KeyPath, origin: str) -> str:
        # As in JSON, the escapes "\ud83d\ude00" are the two halves of one character.
        try:
            return text.encode("utf-16", errors="surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self._add_problem(origin, path, "half of a surrogate pair is not a character; write the character itself")
            return ""

    def _origin_of(self, node: YamlNode) -> str:
        return self.format_origin(node.start_mark.line + 1)

    def _add_problem(self, origin: str, path: KeyPath, text: str) -> None:
        self.problems.append(ConfigProblem(origin, path, text))
