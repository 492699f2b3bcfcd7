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

from mmrl.distributed.ranks import Alone, Ranks
from mmrl.policy.progress_bars import without_bars
from mmrl.types import UserError
from mmrl.utils.files import PARTIAL, RETIRED, sha256_of, sync, write_atomically

HASHES: Final = "hashes.json"


class Exportable(Protocol):
    """A model or processor of transformers."""

    def save_pretrained(self, save_directory: Path) -> object:
        """Write itself into a folder."""


def export_hf(folder: Path, *parts: Exportable, finish: Callable[[Path], None] | None = None) -> None:
    """A Hugging Face folder that `from_pretrained` loads; replaces an earlier one whole. `finish` adds to it.

    Raises:
        UserError: the disk is full or not writable.
    """
    with whole(folder) as aside, without_bars():
        for part in parts:
            part.save_pretrained(aside)
        if finish is not None:
            finish(aside)


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A folder to write into that takes the place of `folder` at the end, or leaves no trace.

    Raises:
        UserError: the disk is full or not writable.
    """
    try:
        with writing(folder):
            yield begin(folder)
            finish(folder)
    except BaseException:
        drop(folder)
        raise


def aside_of(folder: Path) -> Path:
    """Where a folder is written until it is whole."""
    return folder.parent / f".{folder.name}{PARTIAL}"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Tell what the system says against writing there.

    Raises:
        UserError: the disk is full or not writable.
    """
    try:
        with _as_os_error():
            yield
    except OSError as error:
        raise UserError(_cannot_save(folder, error)) from error


def begin(folder: Path) -> Path:
    """An empty folder to write into, which `finish` puts in the place of `folder` and `drop` removes."""
    aside = aside_of(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    return aside


def finish(folder: Path) -> None:
    """Let what was written aside take the place of `folder`."""
    aside, retired = aside_of(folder), folder.parent / f".{folder.name}{RETIRED}"
    for path in aside.rglob("*"):
        sync(path)
    sync(aside)
    if folder.exists():
        shutil.rmtree(retired, ignore_errors=True)
        folder.rename(retired)
    aside.rename(folder)
    sync(folder.parent)
    shutil.rmtree(retired, ignore_errors=True)


def drop(folder: Path) -> None:
    """Leave no trace of what was written aside."""
    shutil.rmtree(aside_of(folder), ignore_errors=True)
    bring_back(folder.parent)


def bring_back(parent: Path) -> None:
    """Undo replacements that were killed between their two renames."""
    for retired in parent.glob(f".*{RETIRED}"):
        folder = parent / retired.name[1:].removesuffix(RETIRED)
        if not folder.exists():
            retired.rename(folder)


def vouch(folder: Path, names: Sequence[str], part: str) -> None:
    """Once these files are on the disk, let the file `part` appear, with what they must hash to."""
    for name in names:
        sync(folder / name)
    write_atomically(folder / part, json.dumps({name: sha256_of(folder / name) for name in names}))


def seal(folder: Path, parts: Sequence[str]) -> None:
    """Write down what all files of these parts must hash to."""
    hashes = {name: of for part in parts for name, of in json.loads((folder / part).read_text()).items()}
    (folder / HASHES).write_text(json.dumps(hashes, indent=1))
    for part in parts:
        (folder / part).unlink()


def damage(folder: Path, needed: Sequence[str], ranks: Ranks | None = None) -> str | None:
    """What is wrong with a folder that was sealed, if anything is; the `needed` files are among those it has.

    Of several `ranks` all must ask, and each reads a part of the files.
    """
    ranks = ranks or Alone()
    hashes = ranks.once(partial(_vouched, folder, needed))
    if isinstance(hashes, str):
        return hashes
    names = list(hashes)[ranks.rank :: ranks.size]
    found = ranks.gather([name for name in names if sha256_of(folder / name) != hashes[name]])
    wrong = [name for of_rank in found for name in of_rank]
    return f"{wrong[0]} does not match its hash" if wrong else None


def _vouched(folder: Path, needed: Sequence[str]) -> dict[str, str] | str:
    """What the folder's files must hash to, by name; or what is wrong before any is read."""
    if not (folder / HASHES).is_file():
        return f"{HASHES} is missing"
    try:
        hashes = json.loads((folder / HASHES).read_text())
    except ValueError:
        return f"{HASHES} is not JSON"
    if not isinstance(hashes, dict):
        return f"{HASHES} does not list hashes"
    lost = [name for name in (*needed, *hashes) if not (folder / name).is_file()]
    if lost:
        return f"{lost[0]} is missing"
    return dict.fromkeys(needed, "") | hashes


@contextmanager
def _as_os_error() -> Iterator[None]:
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


def _cannot_save(folder: Path, error: OSError) -> str:
    free = shutil.disk_usage(folder.parent).free if folder.parent.exists() else 0
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = "free some space" if full else "make the folder writable"
    return (
        f"cannot save {folder}: {error.strerror or error} ({free / 2**20:.0f} MiB free there). Nothing was "
        f"half-written and earlier checkpoints are intact; {advice} and run the same command to go on"
    )
