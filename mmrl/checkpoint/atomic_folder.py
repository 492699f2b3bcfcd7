"""Folders that appear whole or not at all: written aside, synced, hashed, then renamed."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from safetensors import SafetensorError

from mmrl.distributed.ranks import Ranks, SingleProcess
from mmrl.policy.progress_bars import hide_progress_bars
from mmrl.types import UserError
from mmrl.utils.files import PARTIAL_SUFFIX, RETIRED_SUFFIX, compute_sha256, fsync_path, write_atomically

HASHES_FILE: Final = "hashes.json"


class Pretrained(Protocol):
    """A model or processor of transformers."""

    def save_pretrained(self, save_directory: Path) -> object:
        """Write itself into a folder."""


def export_hf_folder(folder: Path, *parts: Pretrained, add_files: Callable[[Path], None] | None = None) -> None:
    """A Hugging Face folder that `from_pretrained` loads; replaces an earlier one whole. `finish` adds to it.

    Raises:
        UserError: the disk is full or not writable.
    """
    with atomic_folder(folder) as aside, hide_progress_bars():
        for part in parts:
            part.save_pretrained(aside)
        if add_files is not None:
            add_files(aside)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into that takes the place of `folder` at the end, or leaves no trace.

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
    """Where a folder is written until it is whole."""
    return folder.parent / f".{folder.name}{PARTIAL_SUFFIX}"


@contextmanager
def report_save_errors(folder: Path) -> Iterator[None]:
    """Tell what the system says against writing there.

    Raises:
        UserError: the disk is full or not writable.
    """
    try:
        with _unwrap_os_errors():
            yield
    except OSError as error:
        raise UserError(_format_save_error(folder, error)) from error


def create_partial(folder: Path) -> Path:
    """An empty folder to write into, which `finish` puts in the place of `folder` and `drop` removes."""
    aside = partial_path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    return aside


def commit_partial(folder: Path) -> None:
    """Let what was written aside take the place of `folder`."""
    aside, retired = partial_path(folder), folder.parent / f".{folder.name}{RETIRED_SUFFIX}"
    for path in aside.rglob("*"):
        fsync_path(path)
    fsync_path(aside)
    if folder.exists():
        shutil.rmtree(retired, ignore_errors=True)
        folder.rename(retired)
    aside.rename(folder)
    fsync_path(folder.parent)
    shutil.rmtree(retired, ignore_errors=True)


def discard_partial(folder: Path) -> None:
    """Leave no trace of what was written aside."""
    shutil.rmtree(partial_path(folder), ignore_errors=True)
    restore_retired(folder.parent)


def restore_retired(parent: Path) -> None:
    """Undo replacements that were killed between their two renames."""
    for retired in parent.glob(f".*{RETIRED_SUFFIX}"):
        folder = parent / retired.name[1:].removesuffix(RETIRED_SUFFIX)
        if not folder.exists():
            retired.rename(folder)


def write_part_hashes(folder: Path, names: Sequence[str], part_file: str) -> None:
    """Once these files are on the disk, let the file `part` appear, with what they must hash to."""
    for name in names:
        fsync_path(folder / name)
    write_atomically(folder / part_file, json.dumps({name: compute_sha256(folder / name) for name in names}))


def merge_part_hashes(folder: Path, part_files: Sequence[str]) -> None:
    """Write down what all files of these parts must hash to."""
    hashes = {name: of for part in part_files for name, of in json.loads((folder / part).read_text()).items()}
    (folder / HASHES_FILE).write_text(json.dumps(hashes, indent=1))
    for part in part_files:
        (folder / part).unlink()


def find_damage(folder: Path, required: Sequence[str], ranks: Ranks | None = None) -> str | None:
    """What is wrong with a folder that was sealed, if anything is; the `needed` files are among those it has.

    Of several `ranks` all must ask, and each reads a part of the files.
    """
    ranks = ranks or SingleProcess()
    hashes = ranks.on_rank0(partial(_read_hashes, folder, required))
    if isinstance(hashes, str):
        return hashes
    names = list(hashes)[ranks.rank :: ranks.size]
    found = ranks.all_gather([name for name in names if compute_sha256(folder / name) != hashes[name]])
    wrong = [name for of_rank in found for name in of_rank]
    return f"{wrong[0]} does not match its hash" if wrong else None


def _read_hashes(folder: Path, required: Sequence[str]) -> dict[str, str] | str:
    """What the folder's files must hash to, by name; or what is wrong before any is read."""
    if not (folder / HASHES_FILE).is_file():
        return f"{HASHES_FILE} is missing"
    try:
        hashes = json.loads((folder / HASHES_FILE).read_text())
    except ValueError:
        return f"{HASHES_FILE} is not JSON"
    if not isinstance(hashes, dict):
        return f"{HASHES_FILE} does not list hashes"
    lost = [name for name in (*required, *hashes) if not (folder / name).is_file()]
    if lost:
        return f"{lost[0]} is missing"
    return dict.fromkeys(required, "") | hashes


@contextmanager
def _unwrap_os_errors() -> Iterator[None]:
    """What safetensors and torch.save make of a full disk, as the OSError that it was."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    except RuntimeError as error:
        if not isinstance(error.__context__, OSError):
            raise
        raise error.__context__ from None


def _format_save_error(folder: Path, error: OSError) -> str:
    free = shutil.disk_usage(folder.parent).free if folder.parent.exists() else 0
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = "free some space" if full else "make the folder writable"
    return (
        f"cannot save {folder}: {error.strerror or error} ({free / 2**20:.0f} MiB free there). Nothing was "
        f"half-written and earlier checkpoints are intact; {advice} and run the same command to go on"
    )
