"""Pictures that a dataset makes or unpacks, as files."""

from __future__ import annotations

import os
from pathlib import Path

from mmrl.types import UserError


def write_if_changed(path: Path, content: bytes) -> None:
    """Write a file in one move, unless it holds just that already.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        if _read_if_exists(path) == content:
            return
        partial = path.with_suffix(f".{os.getpid()}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"{path}: cannot write the picture: {reason}; make room or choose another place") from error


def _read_if_exists(path: Path) -> bytes | None:
    """What a file holds; None where there is none."""
    try:
        with open(path, "rb", buffering=0) as file:  # read whole, so a buffer would be one more copy
            return file.read()
    except FileNotFoundError:
        return None
