"""Reading inside declared folders, writing that leaves the old file or the new one, JSON that any reader accepts."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from mmrl.types import UserError

PARTIAL_SUFFIX: Final = ".partial"
"""Ends the name of a folder that is being written."""
RETIRED_SUFFIX: Final = ".retired"
"""Ends the name of a folder that is being replaced."""
TEMPORARY_SUFFIX: Final = ".tmp"
"""Ends the name of a file that is being written."""
_IMAGE_SUFFIXES: Final = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")


def resolve_inside(path: Path, roots: Sequence[Path]) -> Path:
    """The file that `path` means, links followed; it lies in one of the folders `roots`, which are resolved already.

    Raises:
        UserError: it leads out of them, or nowhere (a loop of links, a name no file can have).
    """
    try:
        place = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{path}: leads nowhere ({error}); correct the path") from error
    if not any(place.is_relative_to(root) for root in roots):
        listed = ", ".join(map(str, roots)) or "none"
        raise UserError(f"{path}: {place} lies outside data.roots ({listed}); add its folder there, or move it")
    return place


def list_frames(folder: Path, roots: Sequence[Path]) -> list[Path]:
    """The pictures of a folder in natural order, 9.jpg before 10.jpg; hidden files are none of them.

    Raises:
        UserError: it holds anything else, or nothing, or a link that leads out of `roots`.
        OSError: it cannot be listed.
    """
    frames = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    if odd := sorted(entry.name for entry in frames if entry.suffix.lower() not in _IMAGE_SUFFIXES):
        raise UserError(f"{folder}: holds {odd[0]}, which is no picture; a folder of frames holds nothing else")
    if not frames:
        raise UserError(f"{folder}: holds no frames; restore or remove it")
    for frame in frames:
        resolve_inside(frame, roots)
    return sorted(frames, key=_natural_sort_key)


def compute_frames_digest(frames: Mapping[str, str]) -> str:
    """The sha256 of a folder of frames, from the sha256 of each by name, in order."""
    return hashlib.sha256("".join(f"{sha256} {name}\n" for name, sha256 in frames.items()).encode()).hexdigest()


def compute_sha256(path: Path) -> str:
    """The sha256 of a file's bytes. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _natural_sort_key(path: Path) -> tuple[list[str | int], str]:
    """Numbers in a name by what they count, the text between them by its letters."""
    pieces = re.split(r"([0-9]+)", path.name)
    return [int(piece) if place % 2 else piece for place, piece in enumerate(pieces)], path.name


@contextmanager
def report_write_errors(path: Path) -> Iterator[None]:
    """Turn what the system says against writing `path` (full disk, no permission) into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}; put that right and run the same command again, "
            "it goes on from the last checkpoint"
        ) from error


def temporary_path(path: Path) -> Path:
    """Where the next content of `path` is written first; a killed run may leave it behind."""
    return path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")


def remove_leftovers(folder: Path) -> None:
    """Remove what killed runs left half-written in a folder."""
    for ending in (PARTIAL_SUFFIX, RETIRED_SUFFIX, TEMPORARY_SUFFIX):
        for scrap in folder.glob(f".*{ending}"):
            if scrap.is_dir():
                shutil.rmtree(scrap)
            else:
                scrap.unlink()


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` in one move, after its bytes are on disk.

    Raises:
        UserError: the file cannot be written; what was there stays.
    """
    fresh = temporary_path(path)
    with report_write_errors(path):
        try:
            with fresh.open("wb") as file:
                # Half a surrogate pair becomes \udxxx, which is its JSON escape.
                file.write(text.encode("utf-8", errors="backslashreplace"))
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        fsync_path(path.parent)


def json_line(record: Mapping[str, Any]) -> str:
    """One line of strict JSON: floats by repr; NaN and infinities become null; other objects their str()."""
    return json.dumps(replace_nonfinite(record), ensure_ascii=False, allow_nan=False, default=str) + "\n"


def replace_nonfinite(value: object) -> object:
    """The same value with null for every float that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): replace_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(inner) for inner in value]
    return value


def fsync_path(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
