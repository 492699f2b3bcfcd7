"""Folders that appear complete or not at all: written under another name, synced, hashed, then renamed.

A folder `a/b` is written as its partial folder `a/.b.partial`. If `a/b` exists, it is first
renamed to `a/.b.retired`, and deleted once the new folder has its name.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, Protocol

from safetensors import SafetensorError

from mmrl.distributed.ranks import Ranks, SingleProcess
from mmrl.policy.pretrained import hide_progress_bars
from mmrl.types import UserError
from mmrl.utils.digests import file_digest
from mmrl.utils.files import PARTIAL_SUFFIX, RETIRED_SUFFIX, fsync_path, write_atomically

HASHES_FILE: Final = "hashes.json"
"""File of a checkpoint that maps every other file to the sha256 of its bytes."""


class Pretrained(Protocol):
    """A model, adapter or processor of Hugging Face."""

    def save_pretrained(self, save_directory: Path) -> object:
        """Write itself into a folder."""


def export_hf_folder(folder: Path, *parts: Pretrained, add_files: Callable[[Path], None] | None = None) -> None:
    """Write a folder of `parts` (a model and its processor) that `from_pretrained` loads, in place of an earlier one.

    `add_files` writes further files into the folder that it is called with. Raises as `atomic_folder`.
    """
    with atomic_folder(folder) as partial_folder, hide_progress_bars():
        for part in parts:
            part.save_pretrained(partial_folder)
        if add_files is not None:
            add_files(partial_folder)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` when the block ends, and vanishes if it raises.

    Raises:
        UserError: the disk is full or not writable.
    """
    try:
        with report_save_errors(folder):
            yield create_partial(folder)
            commit_partial(folder)
    except BaseException:
        discard_partial(folder)
        raise


def partial_path(folder: Path) -> Path:
    """Return the sibling that a folder is written to until it is complete."""
    # A sibling is on the same disk, where a rename is atomic. The dot hides it where checkpoints are listed.
    return folder.parent / f".{folder.name}{PARTIAL_SUFFIX}"


@contextmanager
def report_save_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the operating system in this block into a UserError that says what to do.

    Raises:
        UserError: the disk is full or not writable.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        cause = _find_os_error(error)
        if cause is None:
            raise
        free_bytes = shutil.disk_usage(folder.parent).free if folder.parent.exists() else 0
        # EDQUOT is a full quota, EFBIG a limit on the size of a file: deleting something helps against all three.
        is_full = cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "free some space" if is_full else "make the folder writable"
        raise UserError(
            f"cannot save {folder}: {cause.strerror or cause} ({free_bytes / 2**20:.0f} MiB free there). Nothing was "
            f"half-written and earlier checkpoints are intact; {advice} and run the same command to continue"
        ) from error


def _find_os_error(error: Exception) -> OSError | None:
    """Return the operating system's error behind an error of safetensors or torch.save; None for another cause."""
    if isinstance(error, SafetensorError):
        # safetensors is written in Rust, and gives the number of the OS error only in its text.
        number = re.search(r"\(os error (\d+)\)", str(error))
        return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None
    if isinstance(error, RuntimeError):
        # torch.save raises its own RuntimeError while it handles the OSError of the file it writes to.
        return error.__context__ if isinstance(error.__context__, OSError) else None
    return error if isinstance(error, OSError) else None


def create_partial(folder: Path) -> Path:
    """Create the empty partial folder of `folder`; `commit_partial` or `discard_partial` must follow.

    Raises as `atomic_folder`.
    """
    partial_folder = partial_path(folder)
    with report_save_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A killed run may have left one, with files of another number of ranks.
        shutil.rmtree(partial_folder, ignore_errors=True)
        partial_folder.mkdir()
    return partial_folder


def commit_partial(folder: Path) -> None:
    """Put the partial folder in the place of `folder`."""
    partial_folder = partial_path(folder)
    retired = folder.parent / f".{folder.name}{RETIRED_SUFFIX}"
    # Contents must reach the disk before the rename does, or a power cut could leave a complete-looking empty folder.
    for path in partial_folder.rglob("*"):
        fsync_path(path)
    fsync_path(partial_folder)
    if folder.exists():
        shutil.rmtree(retired, ignore_errors=True)
        # A folder cannot be renamed onto another. A kill between the two renames is undone by `restore_retired`.
        folder.rename(retired)
    # The last line that writes a checkpoint: from here on it exists, complete.
    partial_folder.rename(folder)
    # The name itself is on the disk only when the parent is.
    fsync_path(folder.parent)
    shutil.rmtree(retired, ignore_errors=True)


def discard_partial(folder: Path) -> None:
    """Remove the partial folder, and restore what it was about to replace."""
    shutil.rmtree(partial_path(folder), ignore_errors=True)
    restore_retired(folder.parent)


def restore_retired(parent: Path) -> None:
    """Undo replacements that were killed between their two renames."""
    for retired in parent.glob(f".*{RETIRED_SUFFIX}"):
        folder = parent / retired.name[1:].removesuffix(RETIRED_SUFFIX)
        if not folder.exists():
            retired.rename(folder)


def write_part_hashes(folder: Path, names: Sequence[str], part_file: str) -> None:
    """Write the hashes of one rank's files to `part_file`."""
    # The part file shows the other ranks that these files are on the disk, so they must be there first.
    for name in names:
        fsync_path(folder / name)
    hashes = {name: file_digest(folder / name) for name in names}
    write_atomically(folder / part_file, json.dumps(hashes))


def merge_part_hashes(folder: Path, part_files: Sequence[str]) -> None:
    """Merge the hashes of all ranks into one file, and remove theirs."""
    hashes: dict[str, str] = {}
    for part_file in part_files:
        hashes |= json.loads((folder / part_file).read_text())
    (folder / HASHES_FILE).write_text(json.dumps(hashes, indent=1))
    for part_file in part_files:
        (folder / part_file).unlink()


def find_damage(folder: Path, required: Sequence[str], ranks: Ranks | None = None) -> str | None:
    """Return what is wrong with a saved folder, which must have the `required` files; None if it is intact.

    Collective: with several ranks all must call it, and all get the same answer.
    """
    ranks = ranks or SingleProcess()
    hashes = ranks.on_rank0(partial(_read_hashes, folder, required))
    if isinstance(hashes, str):
        return hashes
    # Each rank hashes a share: the files of a large model take long to read.
    own_damage = []
    for name in list(hashes)[ranks.rank :: ranks.size]:
        try:
            if file_digest(folder / name) != hashes[name]:
                own_damage.append(f"{name} does not match its hash")
        except OSError as error:
            own_damage.append(f"{name} cannot be read: {error.strerror}")
    damage = list(chain.from_iterable(ranks.all_gather(own_damage)))
    return damage[0] if damage else None


def _read_hashes(folder: Path, required: Sequence[str]) -> dict[str, str] | str:
    """Return the hash that each file must have, or a sentence about damage that shows without hashing any file."""
    if not (folder / HASHES_FILE).is_file():
        return f"{HASHES_FILE} is missing"
    try:
        hashes = json.loads((folder / HASHES_FILE).read_text())
    except ValueError:
        return f"{HASHES_FILE} is not JSON"
    except OSError as error:
        return f"{HASHES_FILE} cannot be read: {error.strerror}"
    if not isinstance(hashes, dict):
        return f"{HASHES_FILE} does not list hashes"
    for name in (*required, *hashes):
        if not (folder / name).is_file():
            return f"{name} is missing"
    # A required file without a hash cannot be checked: an empty hash matches nothing, so the file counts as damaged.
    return dict.fromkeys(required, "") | hashes
