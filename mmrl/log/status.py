"""status.json: where a run is. Whoever looks at the run tells by it whether the run is still alive."""

from __future__ import annotations

import json
import os
import socket
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Any, Final, Literal

from mmrl.types import RunInterrupted, UserError
from mmrl.utils.files import write_atomically

HEARTBEAT_S: Final = 5.0
"""Seconds after which the file is written again."""

RunState = Literal["running", "finished", "stopped", "failed"]


class StatusFile(AbstractContextManager["StatusFile"]):
    """Writes the file while its block runs, from a thread of its own, and at the end how the run ended."""

    def __init__(self, path: Path) -> None:
        """Name the file; nothing is written before the block begins."""
        self._path = path
        self._fields: dict[str, Any] = {"stage": None, "step": 0, "steps": 0}
        self._ended = Event()
        self._thread = Thread(target=self._beat, daemon=True, name="status")

    def __enter__(self) -> StatusFile:
        """Write the file for the first time."""
        self._write("running")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write how the run ended."""
        self._ended.set()
        self._thread.join()
        state: RunState = "failed"
        if error is None:
            state = "finished"
        elif isinstance(error, RunInterrupted | KeyboardInterrupt):
            state = "stopped"
        self._write(state)

    def update(self, **fields: str | int) -> None:
        """Change fields of the file. The thread writes them: a step never waits for the disk."""
        self._fields = {**self._fields, **fields}

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            self._write("running")

    def _write(self, state: RunState) -> None:
        status = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "state": state,
            **self._fields,
            "updated": datetime.now(UTC).isoformat(timespec="seconds"),
            "heartbeat_s": HEARTBEAT_S,
        }
        # A full disk ends the run where it writes what it needs, with a message; this file is not worth that.
        with suppress(UserError):
            write_atomically(self._path, json.dumps(status) + "\n")
