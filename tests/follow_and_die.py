"""Follow a run directory for its first tracker, and be killed: `follow_and_die.py RUN MOMENT NUMBER`.

MOMENT is `before` or `after` the tracker takes its NUMBER-th batch of points, or `end`, at which nothing is killed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tracked_runs import FakeTracker, load_options, refuse_network

from mmrl.config import load_config
from mmrl.config.schema.trackers import AnyTracker
from mmrl.log.run_dir import RunDir
from mmrl.trackers import follower
from mmrl.trackers.kinds import open_tracker
from mmrl.trackers.tracker import RunFacts, Tracker


def follow(run_dir: RunDir, moment: str, number: int, fake: Path | None = None) -> None:
    """Follow with batches of two points; `fake` is the file of a tracker that takes the place of the config's."""
    left = number
    follower._BATCH_POINTS = 2  # several batches in a small run

    def open_dying(options: AnyTracker, facts: RunFacts) -> Tracker:
        tracker: Tracker = FakeTracker(fake) if fake else open_tracker(options, facts)
        tracker.log = die_around(tracker.log)  # type: ignore[method-assign]
        return tracker

    def die_around(log: Callable[..., None]) -> Callable[..., None]:
        def wrapped(points: object) -> None:
            nonlocal left
            left -= 1
            if moment == "before" and left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            log(points)
            if moment == "after" and left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        return wrapped

    config = load_config(run_dir.config).config
    following = follower.Follower(run_dir, config, run_dir.path, load_options(run_dir), open_tracker=open_dying)
    following.send_new()
    if moment == "end":
        following.finish("finished")


def follow_in_fork(run_dir: RunDir, moment: str, number: int, fake: Path | None = None) -> int:
    """Follow in a copy of this process; return the signal that killed it, or 0."""
    pid = os.fork()
    if not pid:
        try:
            refuse_network()
            follow(run_dir, moment, number, fake)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    refuse_network()
    follow(RunDir(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3]))
