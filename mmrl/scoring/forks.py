"""Calls rewards in forks of this process, for commands that try them: a fork that hangs is killed."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

from mmrl.types import Failure, FailureKind

_ResultT = TypeVar("_ResultT")


def run_in_forks(tasks: Sequence[Callable[[], _ResultT]], timeout_s: float) -> Iterator[_ResultT | Failure]:
    """Run tasks in a fork and yield their results. A task that hangs or dies fails; a new fork runs the others.

    A task that takes longer than `timeout_s` counts as hanging.
    """
    # Killing its process is the only way to stop a regular expression, and a fork has everything loaded already.
    context = multiprocessing.get_context("fork")
    num_done = 0
    while num_done < len(tasks):
        remaining = tasks[num_done:]
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_send_results, args=(remaining, sender), daemon=True)
        process.start()
        # Only the fork may hold this end, or its death would not close the pipe.
        sender.close()
        try:
            for _ in remaining:
                num_done += 1
                if not receiver.poll(timeout_s):
                    yield Failure(FailureKind.TIMEOUT, f"hung for {timeout_s:g} s")
                    break
                try:
                    result = receiver.recv()
                except EOFError:
                    yield Failure(FailureKind.CRASH, "its process died")
                    break
                yield result
        finally:
            process.kill()
            process.join()


def _send_results(tasks: Sequence[Callable[[], object]], pipe: Connection) -> None:
    for task in tasks:
        result = task()
        sys.stdout.flush()  # what the reward has printed would be lost with this process
        pipe.send(result)
