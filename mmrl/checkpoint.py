"""Saving a run and going on exactly: weights, optimizer, State, RNG; written aside, synced, hashed, then renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from mmrl.types import State, UserError

_HASHES = "hashes.json"


def save(folder: Path, *, weights: nn.Module, optimizer: Mapping[str, Any], state: State) -> None:
    """Write a complete checkpoint at `folder`, or nothing.

    Raises:
        UserError: the disk is full or not writable.
    """
    with _whole(folder) as aside:
        save_model(weights, str(aside / "model.safetensors"))
        torch.save(dict(optimizer), aside / "optimizer.pt")
        torch.save(torch.get_rng_state(), aside / "rng.pt")
        (aside / "state.json").write_text(json.dumps(asdict(state)))
        hashes = {path.name: _sha256(path) for path in sorted(aside.iterdir())}
        (aside / _HASHES).write_text(json.dumps(hashes, indent=1))


def load(folder: Path, *, weights: nn.Module) -> tuple[State, dict[str, Any]]:
    """Restore weights and RNG in place; returns the State and the optimizer's state."""
    load_weights(folder, weights)
    torch.set_rng_state(torch.load(folder / "rng.pt", weights_only=True))
    optimizer: dict[str, Any] = torch.load(folder / "optimizer.pt", weights_only=True)
    return State(**json.loads((folder / "state.json").read_text())), optimizer


def save_weights(folder: Path, weights: nn.Module) -> None:
    """Write weights alone at `folder`, or nothing.

    Raises:
        UserError: the disk is full or not writable.
    """
    with _whole(folder) as aside:
        save_model(weights, str(aside / "model.safetensors"))


def load_weights(folder: Path, weights: nn.Module) -> None:
    """Restore weights in place."""
    load_model(weights, folder / "model.safetensors")


def latest(checkpoints: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole; each one that is not is passed over with a warning."""
    for folder in sorted(_saved(checkpoints), reverse=True):
        damage = _damage(folder)
        if damage is None:
            return folder
        warn(f"checkpoint {folder} is damaged ({damage}); going back to the one before it")
    return None


def prune(checkpoints: Path, keep: int) -> None:
    """Remove all but the newest `keep`, and what an interrupted save left behind."""
    for folder in sorted(_saved(checkpoints))[:-keep]:
        shutil.rmtree(folder)
    for scrap in checkpoints.glob(".*.partial"):
        shutil.rmtree(scrap)


class Exportable(Protocol):
    """A model or processor of transformers."""

    def save_pretrained(self, save_directory: Path) -> object:
        """Write itself into a folder."""


def export_hf(folder: Path, *parts: Exportable) -> None:
    """A Hugging Face folder that `from_pretrained` loads; replaces an earlier export whole.

    Raises:
        UserError: the disk is full or not writable.
    """
    with _whole(folder) as aside:
        for part in parts:
            part.save_pretrained(aside)


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder to write into that takes the place of `folder` at the end, or leaves no trace."""
    aside = folder.parent / f".{folder.name}.partial"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        yield aside
        for path in aside.rglob("*"):
            _sync(path)
        _sync(aside)
        retired = folder.parent / f".{folder.name}.retired.partial"
        if folder.exists():
            folder.rename(retired)
        aside.rename(folder)
        _sync(folder.parent)
        shutil.rmtree(retired, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(_cannot_save(folder, error)) from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _cannot_save(folder: Path, error: OSError) -> str:
    free = shutil.disk_usage(folder.parent).free if folder.parent.exists() else 0
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = "free some space" if full else "make the folder writable"
    return (
        f"cannot save {folder}: {error.strerror or error} ({free / 2**20:.0f} MiB free there). Nothing was "
        f"half-written and earlier checkpoints are intact; {advice} and run the same command to go on"
    )


def _saved(checkpoints: Path) -> list[Path]:
    return [path for path in checkpoints.glob("*") if path.is_dir() and not path.name.startswith(".")]


def _damage(folder: Path) -> str | None:
    hashes = folder / _HASHES
    if not hashes.is_file():
        return f"{_HASHES} is missing"
    for name, expected in json.loads(hashes.read_text()).items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if _sha256(folder / name) != expected:
            return f"{name} does not match its hash"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
