"""The launcher of `mmrl train --nproc`: several processes of one command on this machine, which end together.

The launcher is the process that the user started. It starts one process for each rank, with the environment variables
of torchrun, and then only waits: it has no deadline of its own. A rank that fails or is killed ends the run, since the
others get `SHUTDOWN_GRACE_S` and then SIGKILL. A rank that hangs is noticed by the others, in the next collective
(`mmrl.distributed.torch_ranks`), and they fail.
"""

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

from mmrl.utils.processes import kill_processes, list_tree

SHUTDOWN_GRACE_S: Final = 15.0
"""Seconds that the other ranks have to report an error once one has failed; then they are killed."""

RankProcess = subprocess.Popen[bytes]


def launch(argv: Sequence[str], num_processes: int) -> int:
    """Run `mmrl ARGV` in `num_processes` processes that form one run.

    Signals are passed on to all of these processes, and none of them outlives this call.

    Returns:
        The exit code of the first rank that failed, or 0.
    """
    port = find_free_port()
    processes = []
    for rank in range(num_processes):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # The rank watches this process id. If the launcher dies early, `os.getppid` in the rank would give another.
            "MMRL_LAUNCHER": str(os.getpid()),
        }
        command = [sys.executable, "-m", "mmrl", *argv]
        # A session of its own for each rank: Ctrl-C then reaches it once, through this process, and not twice.
        processes.append(subprocess.Popen(command, env=environment, start_new_session=True))

    def pass_on(signal_number: int, _frame: FrameType | None) -> None:
        for process in processes:
            _signal_process_group(process, signal_number)

    previous_handlers = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _wait_for_ranks(processes)
    finally:
        for process in processes:
            _signal_process_group(process, signal.SIGKILL)
            process.wait()
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _wait_for_ranks(processes: Sequence[RankProcess]) -> int:
    """Wait until all ranks have ended, or until one has failed and the grace period is over; return the exit code."""
    failed: tuple[int, int] | None = None
    deadline = float("inf")
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.1)
        if failed is None:
            failed = _find_failed_rank(processes)
            if failed is not None:
                deadline = time.monotonic() + SHUTDOWN_GRACE_S
    failed = failed or _find_failed_rank(processes)
    if failed is None:
        return 0
    rank, return_code = failed
    if return_code < 0:
        name = signal.Signals(-return_code).name
        print(f"mmrl: error: rank {rank} was ended by {name}; all are stopped", file=sys.stderr)
        return 128 - return_code  # 128 plus the signal's number, as shells report it
    return return_code


def _find_failed_rank(processes: Sequence[RankProcess]) -> tuple[int, int] | None:
    """Return a rank that failed and its return code, minus the number of the signal that ended it; None if none did."""
    failed = []
    for rank, process in enumerate(processes):
        return_code = process.poll()
        if return_code:
            failed.append((rank, return_code))
    # A rank that a signal ended comes first: a rank with an exit code may only have lost its connection to that one.
    return min(failed, key=lambda rank: rank[1] > 0, default=None)


def _signal_process_group(process: RankProcess, signal_number: int) -> None:
    """Send a signal to a rank and the processes it started, if it still runs."""
    if process.poll() is not None:
        return
    if signal_number == signal.SIGKILL:
        # Workers of rewards and tools have groups of their own.
        kill_processes(list_tree(process.pid))
    else:
        os.killpg(process.pid, signal_number)


def is_launched() -> bool:
    """Return True if a launcher (`mmrl train --nproc`, torchrun, deepspeed) started this process as one of several."""
    return os.environ.keys() >= {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def find_free_port() -> int:
    """Return a port of this machine that nobody listens on. Another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
