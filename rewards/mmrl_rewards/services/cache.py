"""Replies kept on disk, so that the same question is asked once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from threading import get_ident


class ReplyCache:
    """Bytes by the hash of what was asked. Writers in several processes and threads do not disturb one another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, request: bytes) -> bytes | None:
        """What was kept, None if nothing was."""
        try:
            return self._path(request).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, request: bytes, reply: bytes) -> None:
        """Keep a reply: written beside its place and moved there, so that it is there whole or not at all."""
        place = self._path(request)
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.with_suffix(f".{os.getpid()}-{get_ident()}")
        draft.write_bytes(reply)
        draft.replace(place)

    def _path(self, request: bytes) -> Path:
        digest = hashlib.sha256(request).hexdigest()
        return self._folder / digest[:2] / f"{digest[2:]}.reply"
