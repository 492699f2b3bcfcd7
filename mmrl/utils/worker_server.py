"""The other side of `worker_pool`: a process that loads once, and the workers that it forks.

A worker pool starts this file in a fresh interpreter, so nothing of the pool's own process (torch, CUDA, threads) is in
it. Loading is slow and forking takes milliseconds, so replacing a worker that hung or died is cheap:

    pool ──control──► server (loads) ──fork──► worker, worker, ...
     └── one socket a worker: lists of payloads ► ◄ lists of results ──┘

Calls that take microseconds are sent and answered many at a time. Which of them runs, and since when, is in memory that
pool and worker share: `CallProgress`.
"""

from __future__ import annotations

import importlib
import io
import json
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from time import monotonic
from typing import Any, NamedTuple, NoReturn, Protocol

from mmrl.types import UserError
from mmrl.utils.processes import die_with_parent, inherit_orphans, kill_orphans, list_tree


class ReportActivity(Protocol):
    """Reports to the pool what a loader does next, for the error message if the loader then hangs or dies."""

    def __call__(self, activity: str, timeout_s: float | None = None) -> None:
        """Report an activity, and the seconds after which it counts as hung; None takes the seconds of the limits."""


# Set before the server's libraries load, so that they start no threads: a fork would lose them.
_SINGLE_THREAD_ENV = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_SERVER_CODE = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from mmrl.utils.worker_server import run_server
run_server(int(sys.argv[1]))
"""
_HEADER, _SIZE, _PROGRESS = struct.Struct("!QQ"), struct.Struct("!Q"), struct.Struct("=qd")
_REPLY_INTERVAL_S = 0.005  # a finished result is held back for at most this long plus one call, to batch replies
_LOOK_INTERVAL_S = 1.0  # at most, between looks at the progress of a batch

Loader = Callable[[ReportActivity], Callable[[Any], object]]
"""Returns the function that workers apply to payloads."""


class WorkerSetup(NamedTuple):
    """The loader of a worker's function. The server calls it once for all its workers, or each worker calls it."""

    load: Loader
    pickler: type[pickle.Pickler]  # pickles results


class MessageSocket:
    """Sends and receives objects over a socket.

    A message is a header (sizes of the pickle and of its out-of-band buffers), the pickle, and the buffers. The
    numbers of an array go straight from the sender's memory into the receiver's, without a copy into the pickle.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, message: object, pickler: type[pickle.Pickler] = pickle.Pickler) -> None:
        """Send an object.

        Raises:
            ConnectionError: the other side is gone.
        """
        body, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        pickler(body, protocol=5, buffer_callback=buffers.append).dump(message)
        views = [buffer.raw() for buffer in buffers]
        sizes = [_SIZE.pack(view.nbytes) for view in views]
        self.connection.sendall(b"".join([_HEADER.pack(body.tell(), len(views)), *sizes, body.getbuffer()]))
        for view in views:
            self.connection.sendall(view)

    def receive(self, timeout_s: float | None = None) -> Any:  # noqa: ANN401
        """Return the next object.

        Raises:
            EOFError, ConnectionError: the other side is gone.
            TimeoutError: it sent nothing for `timeout_s` seconds.
        """
        if timeout_s != self.connection.gettimeout():
            self.connection.settimeout(timeout_s)
        body_size, num_buffers = _HEADER.unpack(self._read(_HEADER.size))
        sizes = [_SIZE.unpack(self._read(_SIZE.size))[0] for _ in range(num_buffers)]
        body = self._read(body_size)
        return pickle.loads(body, buffers=list(map(self._read, sizes)))

    def close(self) -> None:
        """Close this end of the socket."""
        self.connection.close()

    def _read(self, size: int) -> bytearray:
        content = bytearray(size)
        rest = memoryview(content)
        while rest:
            count = self.connection.recv_into(rest)
            if not count:
                raise EOFError
            rest = rest[count:]
        return content


class CallTimeoutError(Exception):
    """A call has taken longer than its timeout; the argument is its number in the batch."""


class CallProgress:
    """The call of a batch that a worker began last, and when, in a file that worker and pool map to memory."""

    def __init__(self, fd: int) -> None:
        os.ftruncate(fd, _PROGRESS.size)
        self._memory = mmap.mmap(fd, _PROGRESS.size)

    def begin(self, index: int) -> float:
        """Record that the call number `index` of a batch begins, and return the time of the monotonic clock."""
        now = monotonic()
        self._memory[:] = _PROGRESS.pack(index, now)
        return now

    def read(self) -> tuple[int, float]:
        """Return the number of the call that began last, and when it did by the monotonic clock."""
        index, began_at = _PROGRESS.unpack(self._memory[:])
        return index, began_at

    def receive_results(self, line: MessageSocket, timeouts_s: Sequence[float | None]) -> list[Any]:
        """Return the next results of a batch, at least one, in order. `timeouts_s` are those of all its calls.

        Raises:
            EOFError, ConnectionError: the worker is gone.
            CallTimeoutError: a call has taken longer than its timeout.
        """
        # At least as often as the shortest timeout: that call may begin unnoticed after one with a long timeout.
        interval_s = min([_LOOK_INTERVAL_S, *(timeout_s for timeout_s in timeouts_s if timeout_s is not None)])
        while True:
            seen = index, began_at = self.read()
            timeout_s = timeouts_s[index]
            left_s = interval_s if timeout_s is None else min(interval_s, began_at + timeout_s - monotonic())
            if wait([line.connection], max(0.0, left_s)):
                results: list[Any] = line.receive()
                return results
            # Read twice: a worker may have been writing at the first time.
            if timeout_s is not None and self.read() == seen and monotonic() >= began_at + timeout_s:
                raise CallTimeoutError(index)


def start_server(control_fd: int, output_fd: int | None) -> subprocess.Popen[bytes]:
    """Call `run_server` in a fresh interpreter, which prints to `output_fd`, or where this process prints."""
    return subprocess.Popen(
        [sys.executable, "-c", _SERVER_CODE, str(control_fd), json.dumps(sys.path)],
        pass_fds=(control_fd,),
        stdin=subprocess.DEVNULL,
        stdout=output_fd,
        stderr=output_fd,
        env=os.environ | _SINGLE_THREAD_ENV,
    )


def run_server(control_fd: int) -> None:
    """Load, then fork and end workers as the pool asks, until it closes `control_fd` or dies."""
    # A signal to the process group (Ctrl-C, a scheduler's SIGTERM) is for the pool's process: it may want to finish and
    # save a step, for which it needs its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = MessageSocket(socket.socket(fileno=control_fd))
    with suppress(EOFError, ConnectionError):
        imports: tuple[str, ...] = control.receive()
        setup: WorkerSetup | None = control.receive()
        for module in imports:
            control.send((f"importing {module}", None))
            importlib.import_module(module)
        work: Callable[[Any], object] | None = None
        if setup is None:
            control.send(None)
        else:
            work = _load_and_report(setup.load, control)
        _manage_workers(control, setup, work)


def _manage_workers(control: MessageSocket, setup: WorkerSetup | None, work: Callable[[Any], object] | None) -> None:
    """Fork and end workers as the pool asks; end all that are left when the pool has closed its end or died."""
    worker_pids: set[int] = set()
    # Processes that a worker leaves behind can then be found and killed.
    inherit_orphans()
    # A user's file may have started processes while it was loaded. They stay.
    kept = set(list_tree(os.getpid()))
    try:
        while True:
            command, fds, _, _ = socket.recv_fds(control.connection, 1, 2)
            match command:
                case b"f":
                    pid = _fork_worker(control, fds, setup, work)
                    worker_pids.add(pid)
                    control.send(pid)
                case b"e":
                    pid = control.receive()
                    worker_pids.remove(pid)
                    exit_code = _end_worker(pid)
                    kill_orphans(kept | worker_pids)
                    control.send(exit_code)
                case _:
                    return
    finally:
        for pid in worker_pids:
            _end_worker(pid)
        kill_orphans(kept)


def _load_and_report(load: Loader, line: MessageSocket) -> Callable[[Any], object]:
    """Call a loader and send the pool each activity and its timeout, then None.

    A UserError is sent instead and ends this process.
    """

    def report(activity: str, timeout_s: float | None = None) -> None:
        line.send((activity, timeout_s))

    try:
        work = load(report)
    except UserError as error:
        line.send(error)
        # Without a traceback, because the pool raises the error.
        os._exit(1)
    line.send(None)
    return work


def _fork_worker(
    control: MessageSocket, fds: Sequence[int], setup: WorkerSetup | None, work: Callable[[Any], object] | None
) -> int:
    """Return the pid of a new worker; in the worker this never returns. `fds` are its socket and its progress."""
    connection = socket.socket(fileno=fds[0])
    server_pid = os.getpid()
    pid = os.fork()
    # Its own group, which can be killed at once. Both sides set it: neither knows which of them is first.
    with suppress(OSError):
        os.setpgid(pid, 0)
    if pid == 0:
        # A server that is killed with the group of its run cannot end its workers, which have their own groups.
        die_with_parent(signal.SIGKILL)
        if os.getppid() != server_pid:
            os._exit(1)
        control.close()
        _run_worker(MessageSocket(connection), CallProgress(fds[1]), setup, work)
    connection.close()
    os.close(fds[1])
    return pid


def _end_worker(pid: int) -> int:
    """Kill a worker, if it still lives, with its group; return its exit code: negative for the signal that ended it."""
    # The kernel does not reuse the pid before `waitpid`.
    os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _run_worker(
    line: MessageSocket, progress: CallProgress, setup: WorkerSetup | None, work: Callable[[Any], object] | None
) -> NoReturn:
    """Answer until the pool closes the socket. An error that is not a UserError ends the process with exit code 1.

    `setup` and `work` are None if the server did not load for its workers; this worker then loads the setup it is sent.
    """
    exit_code = 1
    try:
        if setup is None or work is None:
            setup = line.receive()
            work = _load_and_report(setup.load, line)
        while True:
            _answer_batch(line, progress, line.receive(), work, setup.pickler)
    except (EOFError, ConnectionError):
        exit_code = 0
    # SystemExit too: only its traceback shows why the worker ended.
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # The exit handlers and buffers are the server's: a fork must not run or flush them a second time.
        os._exit(exit_code)


def _answer_batch(
    line: MessageSocket,
    progress: CallProgress,
    payloads: Sequence[Any],
    work: Callable[[Any], object],
    pickler: type[pickle.Pickler],
) -> None:
    """Make the calls of a batch, and send the results of calls that take microseconds together."""
    results: list[object] = []
    sent_at = monotonic()
    for index, payload in enumerate(payloads):
        began_at = progress.begin(index)
        if results and began_at - sent_at > _REPLY_INTERVAL_S:
            _send_results(line, progress, results, index - len(results), pickler)
            results, sent_at = [], progress.begin(index)
        try:
            results.append(work(payload))
        except UserError as error:
            results.append(error)
    _send_results(line, progress, results, len(payloads) - len(results), pickler)


def _send_results(
    line: MessageSocket, progress: CallProgress, results: Sequence[object], first: int, pickler: type[pickle.Pickler]
) -> None:
    """Send results; the first belongs to the call number `first`. Raises if one of them cannot be pickled."""
    try:
        line.send(results, pickler)
    except ConnectionError:
        raise
    except Exception:  # noqa: BLE001 - pickling calls code of the results, which may raise anything
        # One at a time: the results before the bad one arrive, and `progress` names its call as the last one begun.
        for index, result in enumerate(results, first):
            progress.begin(index)
            line.send([result], pickler)
