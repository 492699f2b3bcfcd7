"""Read the files of a run or an evaluation in whatever state they are: being written, cut off, partly deleted, older.

Nothing here raises for a file that is missing or damaged. What could not be read is kept as a problem, and the page
shows it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mmrl.config.yaml_tree import parse_yaml
from mmrl.types import UserError
from mmrl.utils.digests import text_digest

Row = dict[str, Any]
NumberedRow = tuple[int, Row]  # index of the line, from 0, and its object
_ValueT = TypeVar("_ValueT")


class RunFiles:
    """Reads the files of one run, and notes what could not be read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.problems: dict[str, str] = {}  # by file, what could not be read

    def report(self, path: Path, problem: str) -> None:
        """Add a problem of a file to those that the page shows."""
        self.problems[path.relative_to(self.root).as_posix()] = problem

    def read(self, path: Path, parse: Callable[[Path], _ValueT], missing: _ValueT) -> _ValueT:
        """Return what `parse` makes of a file, and `missing` if the file is missing or cannot be read."""
        self.problems.pop(path.relative_to(self.root).as_posix(), None)
        try:
            return parse(path)
        except FileNotFoundError:
            return missing
        except (OSError, ValueError, UserError) as error:
            self.report(path, f"cannot be read ({_shorten(error)})")
            return missing

    def read_object(self, path: Path) -> Row:
        """Return the object in a JSON or YAML file; an empty one if there is none."""
        return self.read(path, _parse_file, {})

    def read_lines(self, path: Path) -> Iterator[NumberedRow]:
        """Yield index and object of each line of a JSONL file. Lines that are no JSON object are left out.

        A last line without its end is left out silently: a writer is at it, or was killed there.
        """
        bad: list[str] = []
        content = self.read(path, lambda file: file.open("rb"), None)
        if content is None:
            return
        with content:
            for index, line in enumerate(content):
                if not line.endswith(b"\n"):
                    break
                try:
                    row = parse_object(line)
                except ValueError as error:
                    bad.append(f"line {index + 1}: {_shorten(error)}")
                    continue
                yield index, row
        if bad:
            self.report(path, f"{len(bad)} line(s) cannot be read ({bad[0]})")


def parse_object(text: bytes) -> Row:
    """Parse a JSON object; a number that is not finite becomes None, since the page's JSON has none.

    Raises:
        ValueError: it is not a JSON object, or nested too deeply.
    """
    try:
        value = json.loads(text.decode(errors="replace"), parse_constant=lambda _: None, parse_float=_parse_float)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return a mapping as it is, and an empty one in place of anything else that a damaged file may hold."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: object) -> list[Any]:
    """Return a list as it is, and an empty one in place of anything else that a damaged file may hold."""
    return value if isinstance(value, list) else []


def pick(row: Mapping[str, Any], *keys: str) -> Row:
    """Return these keys of a row, None for those that it lacks."""
    return {key: row.get(key) for key in keys}


def make_key(name: str) -> str:
    """Return a part of a key for a file's name: letters, digits, `_`, `-` and `.`, which differ for other names."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    return plain if plain == name else f"{plain}.{text_digest(name)[:8]}"


def _parse_float(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _parse_file(path: Path) -> Row:
    if path.suffix != ".yaml":
        return parse_object(path.read_bytes())
    node, _ = parse_yaml(path.read_text(encoding="utf-8", errors="replace"), lambda line: f"line {line}")
    value = None if node is None else node.plain_value
    if not isinstance(value, dict):
        raise ValueError("not a mapping")
    return value


def _shorten(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.split("\n")[0][:120]
