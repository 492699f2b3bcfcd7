"""The process of one tracker: `python -m mmrl.trackers.process RUN KIND BASE_DIR`, started by `start.py`.

A tracker's library has threads, exit handlers and a server that may not answer. In a process of its own it can neither
delay a training step nor keep the run from ending. Standard output carries lines for the user; what libraries print
goes to RUN/trackers/KIND.log. Standard input receives a line when the run ends, and closes without one when it is
killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Final, NoReturn, cast

from mmrl.log.run_dir import RunDir
from mmrl.trackers.follower import Follower
from mmrl.trackers.replay import describe_failure, load_tracker, lock_tracker
from mmrl.trackers.tracker import RunStatus
from mmrl.utils.processes import die_with_parent

_POLL_S: Final = 1.0
_STALL_S: Final = 60.0  # a call that takes longer is reported
_FIRST_RETRY_S, _MAX_RETRY_S = 10.0, 600.0


class FollowLoop:
    """Sends what is new every second until the run has ended, and reports the first problem."""

    def __init__(self, follower: Follower, print_line: Callable[[str], None]) -> None:
        """Report a problem by `print_line`."""
        self._follower, self._print_line = follower, print_line
        self._has_reported = False
        self._status: RunStatus | None = None  # set once the run has ended
        self._ended = Event()
        self._busy_since: float | None = None  # by the monotonic clock, while the tracker is at work

    def run(self) -> None:
        """Follow the run to its end."""
        retry_s = _FIRST_RETRY_S
        while not self._ended.is_set():
            if self._attempt(None):
                retry_s = _FIRST_RETRY_S
                self._ended.wait(_POLL_S)
            else:
                self._ended.wait(retry_s)
                retry_s = min(2 * retry_s, _MAX_RETRY_S)
        self._attempt(self._status)

    def end(self, status: RunStatus) -> None:
        """Let `run` send what is left and return; called by another thread."""
        self._status = status
        self._ended.set()

    def watch(self) -> None:
        """Report a tracker that does not return; called in a thread of its own."""
        while not self._has_reported:
            time.sleep(_POLL_S)
            busy_since = self._busy_since
            if busy_since is not None and time.monotonic() - busy_since > _STALL_S:
                self._report(f"has not answered for {_STALL_S:.0f} s; the run continues")

    def _attempt(self, status: RunStatus | None) -> bool:
        """Send what is new, and with a `status` end the run in the tracker; return False if that failed."""
        self._busy_since = time.monotonic()
        try:
            if status is None:
                self._follower.send_new()
            else:
                self._follower.finish(status)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises must not end the run
            traceback.print_exc()
            later = ", and will be tried again" if status is None else ""
            self._report(f"failed{later}: {describe_failure(error)}")
            return False
        finally:
            self._busy_since = None
        return True

    def _report(self, text: str) -> None:
        """Print the first problem; the log has all of them."""
        if not self._has_reported:
            self._has_reported = True
            self._print_line(text)


def main(run: str, kind: str, base_dir: str) -> NoReturn:
    """Follow a run until it ends."""
    # What a killed run leaves unsent is sent when it resumes.
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run_dir = RunDir(Path(run))
    to_user = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")

    def print_line(text: str) -> None:
        to_user.write(text + "\n")
        to_user.flush()

    try:
        with lock_tracker(run_dir, kind):
            log = os.open(run_dir.trackers / f"{kind}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            config, options = load_tracker(run_dir, kind)
            loop = FollowLoop(Follower(run_dir, config, Path(base_dir), options), print_line)
            Thread(target=_wait_for_end, args=(loop,), daemon=True, name="end of the run").start()
            Thread(target=loop.watch, daemon=True, name="stalls").start()
            loop.run()
    except Exception as error:  # noqa: BLE001 - the user is told
        traceback.print_exc()
        print_line(f"does not follow this run: {describe_failure(error)}")
    # Not `sys.exit`: handlers of libraries could wait for a server for as long as they like.
    sys.stdout.flush()
    os._exit(0)


def _wait_for_end(loop: FollowLoop) -> None:
    line = sys.stdin.readline().strip()
    if not line:
        # The run was killed; when it resumes, another process continues from the mark.
        os._exit(1)
    loop.end(cast("RunStatus", line))


if __name__ == "__main__":
    main(*sys.argv[1:])
