"""Write the files that a dataset makes or unpacks, safely when several processes make the same ones."""

from __future__ import annotations

import os
from pathlib import Path

from mmrl.types import UserError


def write_if_changed(path: Path, content: bytes) -> None:
    """Write a file through a temporary one beside it. Do nothing if the file already has this content.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        if _read_if_exists(path) == content:
            return
        # The process id keeps two runs that make the same file from writing into one temporary file.
        partial = path.with_suffix(f".{os.getpid()}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"{path}: cannot write the file: {reason}; free space or choose another folder") from error


def _read_if_exists(path: Path) -> bytes | None:
    """Return the content of a file, or None if there is no such file."""
    try:
        # The file is read in one call, so a buffer would only add a copy.
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except FileNotFoundError:
        return None
