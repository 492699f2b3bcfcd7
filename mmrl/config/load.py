"""From files and command-line overrides to one checked `Config` that knows where each value came from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from mmrl.config.errors import refusal
from mmrl.config.presets import expand
from mmrl.config.schema import Config, Exam, Select
from mmrl.config.yaml_tree import MAX_DEPTH, Address, Node, Plain, Problem, dotted, leaves, merge, parse
from mmrl.types import UserError

COMMAND_LINE = "command line"
DEFAULT = "default"
MAX_BYTES = 1_000_000
MAX_FILES = 100

Schema = TypeVar("Schema", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A config, the origin of each setting by dotted path, and the files read, the one asked for first."""

    config: Config
    origins: Mapping[str, str]
    files: tuple[Path, ...]


def load(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read a config file, what it extends, and `key=value` overrides; refuse everything that is wrong at once.

    Raises:
        UserError: one line per problem, `file:line: dotted.path: what is wrong, and what to use instead`.
    """
    sources = _Sources()
    root = sources.read(Path(path), asked_by="")
    for override in overrides:
        root = sources.override(root, override)
    root = expand(root)
    config, refusals = _checked(root, Config)
    known = {problem.path for problem in sources.problems}
    problems = sources.problems + [problem for problem in refusals if problem.path not in known]
    if config is None or problems:
        raise UserError("\n".join(map(str, problems)))
    return Loaded(config=config, origins=_origins(config, root), files=tuple(sources.files))


def exam_of(given: Mapping[str, Any], origin: str, overrides: Sequence[str]) -> Exam:
    """The settings of an evaluation: those `given`, which are from `origin`, and `key=value` on top.

    Raises:
        UserError: as `load`.
    """
    sources = _Sources()
    root, _ = parse(json.dumps(given), lambda line: origin)
    for override in overrides:
        root = sources.override(root or Node({}, origin), override)
    root = expand(root or Node({}, origin))
    exam, refusals = _checked(root, Exam)
    problems = sources.problems + refusals
    if exam is None or problems:
        raise UserError("\n".join(map(str, problems)))
    return exam


def cap_steps(loaded: Loaded, steps: int) -> Loaded:
    """The same run with at most `steps` optimizer steps in every stage (a smoke test).

    Raises:
        UserError: fewer than one step.
    """
    if steps < 1:
        raise UserError(f"{COMMAND_LINE}: --steps must be at least 1, got {steps}")
    stages = loaded.config.stages
    longer = [i for i, stage in enumerate(stages) if not isinstance(stage, Select) and (stage.steps or inf) > steps]
    capped = {f"stages.{i}.steps": COMMAND_LINE for i in longer}
    shorter = tuple(s.model_copy(update={"steps": steps}) if i in longer else s for i, s in enumerate(stages))
    config = loaded.config.model_copy(update={"stages": shorter})
    return replace(loaded, config=config, origins=MappingProxyType({**loaded.origins, **capped}))


def read_settings(path: Path) -> dict[str, Plain]:
    """The settings written in one file by dotted path, unchecked: for comparing it with another.

    Raises:
        UserError: the file cannot be read or is not YAML.
    """
    return settings(_Sources().read(path, asked_by="").plain)


def settings(value: Plain) -> dict[str, Plain]:
    """Every leaf of a nested mapping by dotted path."""
    return {dotted(path): leaf for path, leaf in leaves(value)}


@dataclass(slots=True)
class _Sources:
    """Everything read for one config, and what was wrong with it."""

    files: list[Path] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def read(self, path: Path, *, asked_by: str, chain: tuple[Path, ...] = ()) -> Node:
        """A file's tree on top of what it extends."""
        text = _read_text(path, asked_by)
        real = path.resolve()
        if real in chain:
            raise UserError(f"{asked_by}{path} extends itself: {' -> '.join(step.name for step in (*chain, real))}")
        self.files.append(path)
        if len(self.files) > MAX_FILES:
            raise UserError(
                f"{asked_by}{path} is file number {len(self.files)}; a config builds on {MAX_FILES} at most"
            )
        root, problems = parse(text, lambda line: f"{path}:{line}")
        self.problems += problems
        if root is None:
            raise UserError(f"{asked_by}{path} is empty; a config sets at least run, model, data, rewards and stages")
        if not isinstance(root.value, dict):
            raise UserError(f"{root.origin}: a config is a mapping of `key: value` lines, this is something else")
        own = {key: node for key, node in root.value.items() if key != "extends"}
        tree = Node(own, f"{path}:1")
        if "extends" not in root.value:
            return tree
        bases = self._bases(root.value["extends"])
        below = Node({}, tree.origin)
        for base, origin in bases:
            below = merge(below, self.read(path.parent / base, asked_by=f"{origin}: extends: ", chain=(*chain, real)))
        return merge(below, tree)

    def _bases(self, extends: Node) -> list[tuple[str, str]]:
        entries = extends.value if isinstance(extends.value, list) else [extends]
        bases = [(entry.value, entry.origin) for entry in entries if isinstance(entry.value, str) and entry.value]
        if len(bases) < len(entries):
            raise UserError(f"{extends.origin}: extends: must be a file name or a list of them")
        return bases

    def override(self, root: Node, text: str) -> Node:
        """The tree with one `dotted.path=value` applied."""
        address, equals, value = text.partition("=")
        keys = address.strip().split(".")
        if not equals or not all(keys):
            raise UserError(f"{COMMAND_LINE}: {text!r} is no override; write dotted.path=value, such as run.seed=1")
        if len(keys) > MAX_DEPTH:
            raise UserError(f"{COMMAND_LINE}: {address[:40]}... is more than {MAX_DEPTH} levels deep")
        path = _resolve(root, keys)
        node, problems = parse(value, lambda line: COMMAND_LINE, path)
        self.problems += problems
        return _assign(root, path, node or Node(None, COMMAND_LINE))


def _read_text(path: Path, asked_by: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise UserError(f"{asked_by}{path}: no such file (looked in {Path.cwd()})") from error
    except IsADirectoryError as error:
        raise UserError(f"{asked_by}{path} is a directory; name the .yaml file in it") from error
    except OSError as error:
        raise UserError(f"{asked_by}{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # a null character in the name
        raise UserError(f"{asked_by}{str(path)!r} is no file name: {error}") from error
    if len(data) > MAX_BYTES:
        raise UserError(f"{asked_by}{path} is larger than {MAX_BYTES} bytes; this is no config")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}:{line}: not UTF-8 text (byte {data[error.start]:#04x}); save the file as UTF-8"
        ) from error


def _resolve(root: Node, keys: Sequence[str]) -> Address:
    """The place that keys name: list entries by index or by their `name`."""
    path: Address = ()
    for key in keys:
        node, depth = root.nearest(path)
        if depth < len(path) or node.value is None or isinstance(node.value, dict):
            path = (*path, key)
        elif isinstance(node.value, list):
            path = (*path, _index(node.value, key, path))
        else:
            problem = Problem(COMMAND_LINE, path, f"is {node.value!r}, a single value; nothing can be set beneath it")
            raise UserError(str(problem))
    return path


def _index(items: Sequence[Node], key: str, path: Address) -> int:
    places = {str(index): index for index in range(len(items))}
    for index, item in enumerate(items):
        if isinstance(item.value, dict) and "name" in item.value:
            places.setdefault(str(item.value["name"].value), index)
    if key not in places:
        what = f"no such entry; there is {', '.join(places)}" if places else "no such entry; the list is empty"
        raise UserError(str(Problem(COMMAND_LINE, (*path, key), what)))
    return places[key]


def _assign(node: Node, path: Address, value: Node) -> Node:
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(node.value, list) and isinstance(key, int):
        items = list(node.value)
        items[key] = _assign(items[key], rest, value)
        return Node(items, node.origin)
    mapping = dict(node.value) if isinstance(node.value, dict) else {}
    mapping[str(key)] = _assign(mapping.get(str(key), Node(None, COMMAND_LINE)), rest, value)
    return Node(mapping, node.origin)


def _checked(root: Node, schema: type[Schema]) -> tuple[Schema | None, list[Problem]]:
    try:  # by way of JSON, where strict models still take a list for a tuple
        return schema.model_validate_json(json.dumps(root.plain)), []
    except ValidationError as error:
        found = [refusal(detail, root, schema) for detail in error.errors()]
        return None, [problem for problem in found if problem is not None]


def _origins(config: Config, root: Node) -> Mapping[str, str]:
    origins = {}
    for path, _ in leaves(config.model_dump(mode="json")):
        node, depth = root.nearest(path)
        origins[dotted(path)] = node.origin if depth == len(path) else DEFAULT
    return MappingProxyType(origins)
