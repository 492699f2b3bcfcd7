"""status.json: where a run is. Whoever looks at the run tells by it whether the run is still alive."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final, Literal

from mmrl.types import RunInterrupted, UserError
from mmrl.utils.files import write_atomically

HEARTBEAT_S: Final = 5.0
"""Seconds after which the file is written again."""

RunState = Literal["running", "finished", "stopped", "failed"]


@contextmanager
def report_end(report: Callable[[RunState], None]) -> Iterator[None]:
    """Call `report` at the end of this block, inside which a run goes on, with how it ended."""
    state: RunState = "failed"
    try:
        yield
        state = "finished"
    except (RunInterrupted, KeyboardInterrupt):
        state = "stopped"
        raise
    finally:
        report(state)


class StatusFile:
    """The file of one run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fields: dict[str, Any] = {"stage": None, "step": 0, "steps": 0}

    @contextmanager
    def report(self) -> Iterator[None]:
        """Write the file while this block runs, from a thread of its own, and at the end how the run ended."""
        ended = Event()
        thread = Thread(target=self._beat, args=(ended,), daemon=True, name="status")
        self._write("running")
        thread.start()
        with report_end(self._write):
            try:
                yield
            finally:
                ended.set()
                thread.join()

    def update(self, **fields: str | int) -> None:
        """Change fields of the file. The thread writes them: a step never waits for the disk."""
        self._fields = {**self._fields, **fields}

    def _beat(self, ended: Event) -> None:
        while not ended.wait(HEARTBEAT_S):
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
