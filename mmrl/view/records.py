"""Read the files of a run or an evaluation in whatever state they are: being written, cut off, partly deleted, older.

Nothing here raises for a file that is missing or damaged. What could not be read is kept as a problem, and the page
shows it.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from mmrl.config.yaml_tree import parse_yaml
from mmrl.log.rollout_records import TOKEN_COLUMNS
from mmrl.types import UserError
from mmrl.utils.digests import text_digest

Row = dict[str, Any]
NumberedRow = tuple[int, Row]  # index of the line, from 0, and its object
_ArrayKind = tuple[tuple[int, ...], np.dtype[Any]]  # shape and type
_ValueT = TypeVar("_ValueT")


class RunFiles:
    """Reads the files of one run, and notes what could not be read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.problems: dict[str, str] = {}  # by file, what could not be read

    def report(self, path: Path, problem: str) -> None:
        """Add a problem of a file to those that the page shows."""
        self.problems[path.relative_to(self.root).as_posix()] = problem

    def problem(self, path: Path) -> str:
        """Return what could not be read in a file; an empty text if all could."""
        return self.problems.get(path.relative_to(self.root).as_posix(), "")

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
        """Yield index and object of each line of a JSONL file. Lines that are not JSON objects are left out.

        A last line without a line break is left out silently: it is being written, or its writer was killed.
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


def find_token_arrays(path: Path) -> dict[str, list[int]]:
    """Return first and end byte of each array in a file of tokens; each is a .npy file, compressed by raw deflate.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is damaged, or its arrays do not fit together.
    """
    places: dict[str, list[int]] = {}
    kinds: dict[str, _ArrayKind] = {}
    try:
        with path.open("rb") as content, zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                name = entry.filename.removesuffix(".npy")
                with archive.open(entry) as file:
                    kinds[name] = _read_array_kind(file)
                # An entry's header of 30 bytes ends with the lengths of the name and the extra field that follow it.
                content.seek(entry.header_offset + 26)
                start = entry.header_offset + 30 + sum(struct.unpack("<HH", content.read(4)))
                places[name] = [start, start + entry.compress_size]
        with np.load(path, allow_pickle=False) as arrays:
            offset = arrays["offset"]
    except (zipfile.BadZipFile, zlib.error, struct.error, KeyError, EOFError, RuntimeError) as error:
        raise ValueError(f"not an archive of arrays: {error}") from error
    total = int(offset[-1]) if offset.ndim == 1 and offset.size else 0
    expected: dict[str, _ArrayKind] = {"offset": (offset.shape, np.dtype(np.int64))}
    expected |= {name: ((total,), np.dtype(dtype)) for name, dtype in TOKEN_COLUMNS.items()}
    fits = kinds == expected and offset.ndim == 1 and offset.size
    if not fits or offset[0] != 0 or np.any(np.diff(offset) < 0):
        raise ValueError("its arrays do not fit together")
    return places


def _read_array_kind(file: IO[bytes]) -> _ArrayKind:
    """Return shape and type of the array in a .npy file.

    Raises:
        ValueError: it is not a .npy file of format 1.0.
    """
    if np.lib.format.read_magic(file) != (1, 0):  # type: ignore[no-untyped-call]
        raise ValueError("an array of another format")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)  # type: ignore[no-untyped-call]
    return shape, dtype


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return a mapping as it is, and an empty one in place of anything else that a damaged file may hold."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: object) -> list[Any]:
    """Return a list as it is, and an empty one in place of anything else that a damaged file may hold."""
    return value if isinstance(value, list) else []


def pick(row: Mapping[str, Any], *keys: str) -> Row:
    """Return these keys of a row, None for each that it lacks."""
    return {key: row.get(key) for key in keys}


def make_key(name: str) -> str:
    """Return a part of a key, of letters, digits, `_`, `-` and `.`, for a file's name; other names give other parts."""
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
