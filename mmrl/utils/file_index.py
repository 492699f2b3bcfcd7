"""An index of what earlier runs found in files, outside all runs, so that unchanged files are not read again."""

from __future__ import annotations

import os
import sqlite3
import time
from functools import cache
from pathlib import Path
from typing import Final

from mmrl.utils.digests import file_digest

FileStamp = tuple[int, int]
"""Bytes of a file, and the time of its last change in nanoseconds since 1970; (-1, -1) for one that is not there."""
_MAX_PENDING: Final = 1000  # entries that are written together; a killed run loses fewer
_LOCK_WAIT_S: Final = 10.0  # a thousand times as long as such a write takes
_DAYS_KEPT: Final = 90  # else entries of generated media, deleted with their runs, would accumulate
_CREATE: Final = """
CREATE TABLE IF NOT EXISTS entries (
    path BLOB, kind TEXT, num_bytes INTEGER, mtime_ns INTEGER, value TEXT, day INTEGER, PRIMARY KEY (path, kind)
) WITHOUT ROWID
"""


class FileIndex:
    """An SQLite file that several processes may read and write: a value for each file and kind of finding.

    It only saves work. If it cannot be used, `get` returns None for every file, and `problems` says why.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._database: sqlite3.Connection | None = None
        self._pending: list[tuple[bytes, str, int, int, str, int]] = []
        self._today = int(time.time() // 86400)
        self.problems: list[str] = []  # sentences to show the user once
        try:
            self._open()
        except (sqlite3.Error, OSError, RuntimeError) as error:  # RuntimeError: the user has no home
            self._recover(error)

    def get(self, kind: str, path: str) -> str | None:
        """Return what was found in a file; None if that is unknown, or the file was changed since."""
        if self._database is None:
            return None
        query = "SELECT num_bytes, mtime_ns, value FROM entries WHERE path = ? AND kind = ?"
        try:
            entry = self._database.execute(query, (os.fsencode(path), kind)).fetchone()
        except sqlite3.Error as error:
            self._recover(error)
            return None
        return str(entry[2]) if entry is not None and entry[:2] == stamp_file(path) else None

    def put(self, kind: str, path: str, value: str, stamp: FileStamp) -> None:
        """Record what was found in a file; `stamp` must be taken before reading it. `flush` writes pending entries."""
        self._pending.append((os.fsencode(path), kind, *stamp, value, self._today))
        if len(self._pending) >= _MAX_PENDING:
            self.flush()

    def flush(self) -> None:
        """Write what is pending."""
        pending, self._pending = self._pending, []
        if self._database is None or not pending:
            return
        try:
            with self._database:
                self._database.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?)", pending)
        except sqlite3.Error as error:
            self._recover(error)

    def file_digest(self, path: Path) -> str:
        """Return the sha256 of a file, which is not read if the index has it. Raises OSError."""
        name = str(path)
        digest = self.get("sha256", name)
        if digest is None:
            stamp = stamp_file(name)
            digest = file_digest(path)
            self.put("sha256", name, digest, stamp)
        return digest

    def _open(self) -> None:
        path = self._path.expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several threads may use the index: each streamed source may be read in another one.
        self._database = sqlite3.connect(path, timeout=_LOCK_WAIT_S, check_same_thread=False)
        with self._database:
            self._database.execute(_CREATE)
            self._database.execute("DELETE FROM entries WHERE day < ?", (self._today - _DAYS_KEPT,))

    def _recover(self, error: Exception) -> None:
        """Do without the index from now on, or begin a new one in place of a damaged one."""
        if self._database is not None:
            self._database.close()
            self._database = None
        # A subclass means that the file cannot be reached, read, locked or written; the class itself means damage.
        is_damaged = type(error) is sqlite3.DatabaseError
        if is_damaged:
            try:
                self._path.expanduser().unlink(missing_ok=True)
                self._open()
            except (sqlite3.Error, OSError) as second_error:
                self._database = None
                error, is_damaged = second_error, False
        if is_damaged:
            self.problems.append(f"{self._path}: damaged ({error}), so a new one is begun and media are opened again")
        else:
            self.problems.append(
                f"{self._path}: cannot be used ({error}), so media are opened at each start; "
                "make it writable, or set XDG_CACHE_HOME to another folder"
            )


@cache
def shared_file_index() -> FileIndex:
    """Return the index of this user: `mmrl/files.sqlite` in $XDG_CACHE_HOME, or else in ~/.cache."""
    return FileIndex(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mmrl", "files.sqlite"))


def stamp_file(path: str) -> FileStamp:
    """Return the stamp of a file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return (-1, -1)
    return status.st_size, status.st_mtime_ns
