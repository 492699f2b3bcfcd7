"""Sends a run to a tracker from its files, for `mmrl track` and for the process that follows a run."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from mmrl.config import Config, load_config
from mmrl.config.schema.trackers import AnyTracker
from mmrl.log.run_dir import RunDir
from mmrl.trackers.follower import Follower, count_unsent
from mmrl.trackers.kinds import check_trackers
from mmrl.types import UserError
from mmrl.utils.files import report_write_errors

_LOCK_WAIT_S: Final = 10.0
_MAX_REASON_CHARS: Final = 300


def replay_run(run_dir: RunDir, kind: str, overrides: Sequence[str] = ()) -> str:
    """Send what a tracker of this kind lacks of a run; return a line that says how much it was.

    Raises:
        UserError: there is no such run, an option is unknown, a library is missing, or the tracker fails.
    """
    config, options = load_tracker(run_dir, kind, overrides)
    check_trackers([options])
    with lock_tracker(run_dir, kind):
        num_lines = count_unsent(run_dir, kind)
        try:
            Follower(run_dir, config, Path.cwd(), options).finish("finished" if run_dir.is_finished() else "stopped")
        except UserError:
            raise
        except Exception as error:
            sent = num_lines - count_unsent(run_dir, kind)
            raise UserError(
                f"{kind} failed after {sent:,} of {num_lines:,} lines: {describe_failure(error)}; put that right and "
                "run the same command again, it sends the rest"
            ) from error
    return f"Sent {num_lines:,} lines of metrics.jsonl to {kind}."


def load_tracker(run_dir: RunDir, kind: str, overrides: Sequence[str] = ()) -> tuple[Config, AnyTracker]:
    """Return the config of a run, and the options that it has for this kind of tracker, or the defaults.

    `key=value` overrides change options.

    Raises:
        UserError: the config cannot be read or is of another version of mmrl, or an option is unknown.
    """
    config = load_config(run_dir.config).config
    settings: dict[str, object] = {"kind": kind}
    for tracker in config.logging.trackers:
        if tracker.kind == kind:
            settings = tracker.model_dump(mode="json")
    changes = [f"logging.trackers={json.dumps([settings])}"]
    changes += [f"logging.trackers.0.{override}" for override in overrides]
    return config, load_config(run_dir.config, changes).config.logging.trackers[0]


@contextmanager
def lock_tracker(run_dir: RunDir, kind: str) -> Iterator[None]:
    """Keep other processes from sending this run to this kind of tracker.

    Raises:
        UserError: another does so already, or the folder cannot be written.
    """
    path = run_dir.trackers / f"{kind}.lock"
    with report_write_errors(path):
        path.parent.mkdir(exist_ok=True)
        lock = path.open("w")
    # The process of a run that was killed ends a moment after it.
    until = time.monotonic() + _LOCK_WAIT_S
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise UserError(f"{run_dir.path}: another process sends this run to {kind}; wait for it") from None
                time.sleep(0.1)
        yield


def describe_failure(error: Exception) -> str:
    """Return what a tracker raised on one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text:.{_MAX_REASON_CHARS}}"
