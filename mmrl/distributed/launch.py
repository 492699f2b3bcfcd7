"""Several processes of one command on this machine, which end together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Final

SHUTDOWN_GRACE_S: Final = 15.0  # for the others to say what they lost, once one has failed


def launch(argv: Sequence[str], num_processes: int) -> int:
    """Run `mmrl WORDS` in `count` processes that find each other; returns the exit code of the first to fail, or 0.

    Signals go on to all of them. When one fails, the others are given a moment and then killed: none is left behind.
    """
    port = _find_free_port()
    processes = [_start_rank(argv, rank, num_processes, port) for rank in range(num_processes)]

    def pass_on(which: int, _frame: FrameType | None) -> None:
        for process in processes:
            _signal_process_group(process, which)

    kept = {which: signal.signal(which, pass_on) for which in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _wait_for_ranks(processes)
    finally:
        for process in processes:
            _signal_process_group(process, signal.SIGKILL)
            process.wait()
        for which, handler in kept.items():
            signal.signal(which, handler)


def _wait_for_ranks(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all, or until one has failed and the grace is over."""
    failed: tuple[int, int] | None = None
    deadline = float("inf")
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.1)
        if failed is None and (failed := _find_failed_rank(processes)):
            deadline = time.monotonic() + SHUTDOWN_GRACE_S
    rank, code = failed or _find_failed_rank(processes) or (0, 0)
    if code < 0:
        print(f"mmrl: error: rank {rank} was ended by {signal.Signals(-code).name}; all are stopped", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _find_failed_rank(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int] | None:
    """The rank that failed, and its code; of several one that a signal ended, as the others lost it."""
    codes = [(rank, code) for rank, process in enumerate(processes) if (code := process.poll())]
    return min(codes, key=lambda failed: failed[1] > 0, default=None)


def _start_rank(argv: Sequence[str], rank: int, num_processes: int, port: int) -> subprocess.Popen[bytes]:
    """A process in a session of its own: a Ctrl-C reaches it once, from us."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_processes,
        "LOCAL_WORLD_SIZE": num_processes,
        "MASTER_PORT": port,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "mmrl", *argv],
        env={
            **os.environ,
            **{name: str(value) for name, value in place.items()},
            "MASTER_ADDR": "127.0.0.1",
            "MMRL_LAUNCHER": str(os.getpid()),  # it may be gone before the process can ask for its parent
        },
        start_new_session=True,
    )


def _signal_process_group(process: subprocess.Popen[bytes], signal_number: int) -> None:
    """To a process and what it has started, if it is there."""
    if process.poll() is None:
        os.killpg(process.pid, signal_number)


def _find_free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
