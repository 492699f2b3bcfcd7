"""Limits of worker processes: their memory, the processes they start, the text they print.

The kernel's limits do not fit. RLIMIT_AS and RLIMIT_DATA count address space, of which torch reserves far more than it
uses; RLIMIT_NPROC counts all processes of a user; a cgroup needs rights that a run does not have. So a thread of the
pool reads /proc ten times a second. Only Linux has /proc: elsewhere only the output is limited.
"""

from __future__ import annotations

import os
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from threading import Event, Thread
from typing import Final, NamedTuple

from mmrl.utils.messages import escape_controls
from mmrl.utils.processes import kill_processes, list_tree

_CHECK_INTERVAL_S = 0.1
_READ_BYTES = 2**20
_KIB, _MIB = 2**10, 2**20

STARTUP_TIMEOUT_S: Final = 300.0
"""Seconds without a report after which loading counts as hung. A file of the user's may load a model."""
MAX_OUTPUT_KIB: Final = 256
"""Most KiB of output that a run shows from all workers of one server together."""


class WorkerLimits(NamedTuple):
    """Limits of one worker, with all processes that it starts. None sets no limit."""

    startup_timeout_s: float  # seconds after a report of a loader before it counts as hung; a report may name others
    call_timeout_s: float | None = None  # seconds of a call that is submitted without its own deadline
    memory_mib: int | None = None  # memory held at any time
    processes: int | None = None  # processes at any time, the worker included
    reads_output: bool = False  # show up to MAX_OUTPUT_KIB of what all workers of a server print, and drop the rest


class WorkerWatch:
    """Watches a server and its workers in a thread: shows their output, and kills those that exceed a limit."""

    def __init__(self, server_pid: int, output_fd: int, limits: WorkerLimits) -> None:
        """Start the thread. It reads `output_fd`, the end of a pipe, and closes it."""
        self.workers: set[int] = set()  # pids of living workers
        self.reasons: dict[int, str] = {}  # by pid of a killed process: the limit that it exceeded, for its owner
        self.is_loading = True  # the server runs code of users only while it loads
        self._server_pid, self._output_fd, self._limits = server_pid, output_fd, limits
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._shown_bytes = self._dropped_bytes = 0
        self._closed = Event()
        self._thread = Thread(target=self._watch, daemon=True, name="worker-watch")
        self._thread.start()

    def close(self) -> None:
        """Stop watching a server that has ended, once its remaining output has been read."""
        self._closed.set()
        self._thread.join(1.0)

    def _watch(self) -> None:
        next_check = 0.0
        is_open = True
        # An orphan of a worker may hold the pipe open, so the loop does not wait for its end once the server is gone.
        while is_open and not (self._closed.is_set() and not wait([self._output_fd], 0.0)):
            if wait([self._output_fd], _CHECK_INTERVAL_S):
                content = os.read(self._output_fd, _READ_BYTES)
                is_open = bool(content)
                self._show_output(content)
            if time.monotonic() >= next_check and not self._closed.is_set():
                self._check_trees()
                next_check = time.monotonic() + _CHECK_INTERVAL_S
        os.close(self._output_fd)
        if self._dropped_bytes:
            sys.stderr.write(f"worker processes printed {self._dropped_bytes:,} bytes that are not shown\n")

    def _show_output(self, content: bytes) -> None:
        """Write to standard error what the limit leaves, without control characters; count the rest."""
        shown = content[: MAX_OUTPUT_KIB * _KIB - self._shown_bytes]
        self._shown_bytes += len(shown)
        text = escape_controls(self._decoder.decode(shown))
        if len(shown) < len(content) and not self._dropped_bytes:
            text += (
                f"\nwarning: worker processes have printed more than {MAX_OUTPUT_KIB} KiB; the rest is counted, and "
                "not shown\n"
            )
        self._dropped_bytes += len(content) - len(shown)
        # The terminal may be gone.
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def _check_trees(self) -> None:
        """Kill each worker that exceeds a limit, with its processes, and record the reason.

        Processes that workers have left behind are counted together, as the server's.
        """
        trees = [(pid, list_tree(pid)) for pid in tuple(self.workers)]
        in_workers = {member for _, tree in trees for member in tree}
        # While the server loads, it runs code of users and counts too. Later it shares its memory with the workers.
        others = [pid for pid in list_tree(self._server_pid) if pid not in in_workers]
        trees.append((self._server_pid, others if self.is_loading else others[1:]))
        for pid, tree in trees:
            reason = self._exceeded_limit(tree)
            if reason:
                self.reasons[pid] = reason
                kill_processes(tree)

    def _exceeded_limit(self, tree: Sequence[int]) -> str | None:
        """Return the limit that the processes of a tree exceed together, None if they exceed none."""
        memory_mib, processes = self._limits.memory_mib, self._limits.processes
        resident_pages = [int(_read(pid, "statm").split()[1]) for pid in tree]
        # A process that has ended and was not waited for holds no page.
        if processes is not None and len(resident_pages) - resident_pages.count(0) > processes:
            return f"had more than {processes} processes (worker_limits.processes)"
        if memory_mib is None or sum(resident_pages) * os.sysconf("SC_PAGE_SIZE") <= memory_mib * _MIB:
            return None
        # Forks share pages, which the numbers above count for each of them. The exact number takes longer to read.
        exact_kib = 0
        for pid, pages in zip(tree, resident_pages, strict=True):
            fields = _read(pid, "smaps_rollup").partition("\nPss:")[2].split()
            exact_kib += int(fields[0]) if fields else pages * os.sysconf("SC_PAGE_SIZE") // _KIB
        if exact_kib * _KIB > memory_mib * _MIB:
            return f"held more than {memory_mib} MiB of memory (worker_limits.memory_mib)"
        return None


def _read(pid: int, name: str) -> str:
    """Return a file of /proc about a process, zeros for one that has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return "0 0"
