"""Finds and kills processes that this one has started, and changes settings of this one. Most of it needs Linux."""

from __future__ import annotations

import ctypes
import glob
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # from linux/prctl.h
_PR_SET_CHILD_SUBREAPER: Final = 36
_M_TRIM_THRESHOLD: Final = -1  # from malloc.h
_M_MMAP_THRESHOLD: Final = -3
_MAX_KILL_ROUNDS = 100


def die_with_parent(signum: signal.Signals) -> None:
    """Let the kernel send this process a signal when its parent dies; does nothing outside Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)


def inherit_orphans() -> None:
    """Let this process adopt the processes that a child leaves behind when it ends; does nothing outside Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def keep_freed_memory() -> None:
    """Let the allocator keep up to 1 GiB of freed memory, for a model on a CPU; does nothing without glibc.

    A forward and backward pass allocates and frees all its activations. glibc would give them back to the kernel, which
    clears each page again at its next use: 4 to 8 % of the CPU time of a learner step of 25 million parameters.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # musl has none
        # The largest threshold that glibc accepts; by itself it would approach this value slowly.
        libc.mallopt(_M_MMAP_THRESHOLD, 2**25)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**30)


def list_tree(pid: int) -> list[int]:
    """Return the pids of a process and of its living descendants, parents before their children."""
    tree = [pid]
    # The list grows while it is read.
    for parent in tree:
        # Each thread has its own children.
        for path in glob.glob(f"/proc/{parent}/task/*/children"):
            with suppress(OSError):
                tree += map(int, Path(path).read_text().split())
    return tree


def kill_processes(pids: Sequence[int]) -> None:
    """Kill processes with their groups. A group is killed at once, so none of it can fork ahead of the signal."""
    own_group = os.getpgrp()
    for pid in pids:
        with suppress(ProcessLookupError):
            group = os.getpgid(pid)
            if group == pid and group != own_group:
                os.killpg(group, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)


def kill_orphans(kept: set[int]) -> None:
    """Kill all children of this process but those `kept`, with their descendants, and wait for them.

    The caller must have called `inherit_orphans`, which makes processes of a killed worker its children.
    """
    for _ in range(_MAX_KILL_ROUNDS):
        orphans = []
        for path in glob.glob("/proc/self/task/*/children"):
            orphans += [pid for pid in map(int, Path(path).read_text().split()) if pid not in kept]
        if not orphans:
            return
        for orphan in orphans:
            kill_processes(list_tree(orphan))
            with suppress(ChildProcessError):
                os.waitpid(orphan, 0)
