"""Files: reading inside allowed folders, atomic writing, and JSON that every parser accepts."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from mmrl.types import UserError

PARTIAL_SUFFIX: Final = ".partial"
"""Ends the name of a folder that is being written."""
RETIRED_SUFFIX: Final = ".retired"
"""Ends the name of a folder that is being replaced."""
TEMPORARY_SUFFIX: Final = ".tmp"
"""Ends the name of a file that is being written."""
_RESUME: Final = "correct this and run the same command again; a run continues from its last checkpoint"
_IMAGE_SUFFIXES: Final = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")


def shipped_folder(parent: Path, installed: str, source: str) -> Path:
    """Return a folder that comes with mmrl: a wheel has it under the name `installed`, a clone under `source`."""
    return parent / installed if (parent / installed).is_dir() else parent / source


def resolve_inside(path: Path | str, roots: Sequence[Path], folders: dict[str, str] | None = None) -> Path:
    """Resolve the links of `path`, and check that the file lies in one of the resolved folders `roots`.

    A caller with many files passes the same `folders` each time, as a cache of resolved folders.

    Raises:
        UserError: it lies outside them, or cannot be resolved (a loop of links, an impossible name).
    """
    try:
        resolved = _resolve_links(os.fspath(path), {} if folders is None else folders)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: leads nowhere ({reason}); correct the path") from error
    if not f"{resolved}/".startswith(tuple(f"{str(root).rstrip('/')}/" for root in roots)):
        listed = ", ".join(map(str, roots)) or "none"
        name = f"{path}: {resolved}" if os.fspath(path) != resolved else resolved
        raise UserError(
            f"{name} lies outside data.media_roots ({listed}); add its folder there "
            "(`mmrl eval` and `mmrl view`: --media-root) or move it"
        )
    return Path(resolved)


def _resolve_links(path: str, folders: dict[str, str]) -> str:
    """Return a path without links; raises OSError for a loop of links, and ValueError for an impossible name."""
    # Strings, because this runs for every medium and `Path.resolve` takes twice as long.
    folder, name = os.path.split(path)
    if folder in folders and name not in ("", os.curdir, os.pardir) and "\0" not in name:
        resolved = os.path.join(folders[folder], name)
        if not os.path.islink(resolved):
            return resolved
    try:
        resolved = os.path.realpath(path, strict=True)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise
        return os.path.realpath(path)  # the caller reports a file that is missing or unreadable
    folders[folder] = os.path.realpath(folder)
    return resolved


def list_frames(folder: Path, roots: Sequence[Path]) -> list[Path]:
    """Return the images of a folder of video frames in natural order: 9.jpg before 10.jpg. Hidden files are ignored.

    Raises:
        UserError: it holds other files, or no image, or a link that leads out of `roots`.
        OSError: it cannot be listed.
    """
    frames = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    other_files = sorted(entry.name for entry in frames if entry.suffix.lower() not in _IMAGE_SUFFIXES)
    if other_files:
        raise UserError(
            f"{folder}: holds {other_files[0]}, which is not an image; a folder of frames holds nothing else"
        )
    if not frames:
        raise UserError(f"{folder}: holds no frames; restore or remove it")
    for frame in frames:
        resolve_inside(frame, roots)
    return sorted(frames, key=_natural_sort_key)


@contextmanager
def report_write_errors(path: Path, remedy: str = _RESUME) -> Iterator[None]:
    """Turn an OSError inside this block (full disk, no permission) into a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}; {remedy}") from error


def check_not_deleted(path: Path) -> None:
    """Raise a UserError if a run directory, or a file in it, was deleted: a writer would create it again."""
    if not path.exists():
        lost = path if path.parent.exists() else path.parent
        raise UserError(
            f"{lost} was deleted or moved while the run was writing to it: its checkpoints, metrics and "
            "rollouts are lost unless you put it back; the run has ended"
        )


def temporary_path(path: Path) -> Path:
    """Return the sibling that `path` is written to before it is renamed.

    A killed run may leave it behind; `remove_leftovers` deletes it.
    """
    return path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")


def random_temporary_path(path: Path) -> Path:
    """Return a `temporary_path` with a random name, for a file that several processes or machines may write at once."""
    return temporary_path(path.with_name(f"{path.name}.{uuid4().hex}"))


def remove_leftovers(folder: Path) -> None:
    """Delete the half-written files and folders that killed runs left in `folder`."""
    for suffix in (PARTIAL_SUFFIX, RETIRED_SUFFIX, TEMPORARY_SUFFIX):
        for leftover in folder.glob(f".*{suffix}"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the content of `path` in one step: a reader, or a crash, sees the old content or the new one.

    Raises:
        UserError: the file cannot be written; the old content is kept.
    """
    if isinstance(content, str):
        # A lone surrogate, which a model may generate, cannot be UTF-8; it becomes \udxxx, its JSON escape.
        content = content.encode("utf-8", errors="backslashreplace")
    fresh = temporary_path(path)
    with report_write_errors(path):
        try:
            with fresh.open("wb") as file:
                file.write(content)
                file.flush()
                # The bytes must be on disk before the name is: after a power cut the file could be empty otherwise.
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        fsync_path(path.parent)


def json_line(record: Mapping[str, Any]) -> str:
    """Return one line of strict JSON. Floats keep all digits, NaN and infinities become null, other objects `str()`."""
    return json.dumps(replace_nonfinite(record), ensure_ascii=False, allow_nan=False, default=str) + "\n"


def read_complete_batches(path: Path, batch_sizes: Sequence[int]) -> list[list[bytes]]:
    """Return the lines of each complete batch at the start of a file, and cut the file off after them.

    `batch_sizes` has the lines of each batch, in order. The file need not exist.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    batches: list[list[bytes]] = []
    num_kept = 0
    for size in batch_sizes:
        batch = lines[num_kept : num_kept + size]
        # A kill in the middle of a write leaves a line without its end.
        if len(batch) < size or not batch[-1].endswith(b"\n"):
            break
        batches.append(batch)
        num_kept += size
    if num_kept < len(lines):
        os.truncate(path, sum(map(len, lines[:num_kept])))
    return batches


def replace_nonfinite(value: object) -> object:
    """Return `value` with None in place of every float, at any depth, that JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): replace_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return list(map(replace_nonfinite, value))
    return value


def fsync_path(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _natural_sort_key(path: Path) -> tuple[list[str | int], str]:
    """Return a key that compares digits in a name as numbers; names that are equal by it compare as text."""
    pieces: list[str | int] = []
    for index, piece in enumerate(re.split(r"([0-9]+)", path.name)):
        # The pattern is a group, so text and digits alternate, text first.
        pieces.append(int(piece) if index % 2 else piece)
    return pieces, path.name
