"""Follow a run directory for a tracker, and be killed: `follow_and_die.py RUN NAME MOMENT NUMBER`.

MOMENT is `before` or `after` the tracker takes its NUMBER-th batch of rows, or `end`, at which nothing is killed.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tracked_runs import FakeTracker, make_follower, refuse_network

from mmrl.log.run_dir import RunDir
from mmrl.log.trackers import process
from mmrl.log.trackers.backends import TRACKERS, RunFacts, Tracker


def follow(run_dir: RunDir, name: str, moment: str, number: int, fake: Path | None = None) -> None:
    """Follow with batches of two rows; `fake` is the file of a tracker that takes the place of the named one."""
    left, open_tracker = number, TRACKERS[name]
    process._BATCH_ROWS = 2  # type: ignore[misc]  # several batches in a small run

    def open_dying(facts: RunFacts) -> Tracker:
        tracker: Tracker = FakeTracker(fake) if fake else open_tracker(facts)
        tracker.log = die_around(tracker.log)  # type: ignore[method-assign]
        return tracker

    def die_around(log: Callable[..., None]) -> Callable[..., None]:
        def wrapped(rows: object) -> None:
            nonlocal left
            left -= 1
            if moment == "before" and left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            log(rows)
            if moment == "after" and left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        return wrapped

    TRACKERS[name] = open_dying
    following = make_follower(run_dir, name)
    following.send_new()
    if moment == "end":
        following.finish("finished")


def follow_in_fork(run_dir: RunDir, name: str, moment: str, number: int, fake: Path | None = None) -> int:
    """Follow in a copy of this process; return the signal that killed it, or 0."""
    pid = os.fork()
    if not pid:
        try:
            refuse_network()
            follow(run_dir, name, moment, number, fake)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    refuse_network()
    follow(RunDir(Path(sys.argv[1])), sys.argv[2], sys.argv[3], int(sys.argv[4]))
