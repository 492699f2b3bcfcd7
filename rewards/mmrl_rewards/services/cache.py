"""Keeps replies on disk, so that no request is sent twice."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from threading import get_ident


class ReplyCache:
    """Maps requests to replies, both bytes. Several processes and threads may write to one folder at the same time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, request: bytes) -> bytes | None:
        """Return the reply to a request, or None if there is none."""
        try:
            return self._path(request).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, request: bytes, reply: bytes) -> None:
        """Keep a reply. It is renamed to its path once it is complete, so that nobody reads a part of it."""
        path = self._path(request)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary_path = path.with_suffix(f".{os.getpid()}-{get_ident()}")
        temporary_path.write_bytes(reply)
        temporary_path.replace(path)

    def _path(self, request: bytes) -> Path:
        digest = hashlib.sha256(request).hexdigest()
        return self._folder / digest[:2] / f"{digest[2:]}.reply"
