"""The other side of `worker_pool`: a process that loads once, and the workers that it forks.

A worker pool starts this file in a fresh interpreter, so nothing of the pool's own process (torch, CUDA, threads) is in
it. Loading is slow and forking takes milliseconds, which makes it cheap to replace a worker that hung or died:

    pool ──control──► server (loads) ──fork──► worker, worker, ...
     └──────────────── one socket a worker: payloads ► ◄ results ────┘

"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, cast

from mmrl.types import UserError
from mmrl.utils.processes import die_with_parent, inherit_orphans, kill_orphans, list_tree

ReportActivity = Callable[[str], None]
"""Tells the pool what a loader is about to do, for the error message should that hang or end the process."""

_HEADER, _SIZE = struct.Struct("!QQ"), struct.Struct("!Q")
_READ_AHEAD_BYTES = 2**16

Loader = Callable[[ReportActivity], Callable[[Any], object]]
"""Returns the function that workers apply to payloads."""


class WorkerSetup(NamedTuple):
    """The work of a worker: sent to the server, which loads once for all its workers, or else to each worker."""

    load: Loader
    pickler: type[pickle.Pickler]  # pickles results


class MessageSocket:
    """Sends and receives objects over a socket.

    A message is a header (sizes of the pickle and of its out-of-band buffers), the pickle, and the buffers. The
    numbers of an array are copied once, from where they stand to where they stay.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        # Results of calls that take microseconds come several at a time; one system call reads them all.
        self._reader = cast(io.BufferedReader, connection.makefile("rb", buffering=_READ_AHEAD_BYTES))

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
        self._reader.close()
        self.connection.close()

    def _read(self, size: int) -> bytearray:
        content = bytearray(size)
        if self._reader.readinto(content) < size:
            raise EOFError
        return content


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
            control.send(f"importing {module}")
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
    # So that processes that a worker leaves behind can be found and killed.
    inherit_orphans()
    # A user's file may have started processes while it was loaded. They stay.
    kept = set(list_tree(os.getpid()))
    try:
        while True:
            # Read by the byte: `receive` may read ahead, which would lose the socket sent along.
            command, sockets, _, _ = socket.recv_fds(control.connection, 1, 1)
            match command:
                case b"f":
                    pid = _fork_worker(control, sockets[0], setup, work)
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
    """Call a loader. The pool hears of each activity, then None; or a UserError, which ends this process."""
    try:
        work = load(line.send)
    except UserError as error:
        line.send(error)
        # Without a traceback, because the pool raises the error.
        os._exit(1)
    line.send(None)
    return work


def _fork_worker(
    control: MessageSocket, socket_fd: int, setup: WorkerSetup | None, work: Callable[[Any], object] | None
) -> int:
    """Return the pid of a new worker, which answers at a socket of its own; in the worker this never returns."""
    connection = socket.socket(fileno=socket_fd)
    server_pid = os.getpid()
    pid = os.fork()
    # A group of its own, which can be killed at once. Both sides set it: neither knows which of them is first.
    with suppress(OSError):
        os.setpgid(pid, 0)
    if pid == 0:
        # A server that is killed with the group of its run cannot end its workers, which have groups of their own.
        die_with_parent(signal.SIGKILL)
        if os.getppid() != server_pid:
            os._exit(1)
        control.close()
        _run_worker(MessageSocket(connection), setup, work)
    connection.close()
    return pid


def _end_worker(pid: int) -> int:
    """Kill a worker, if it still lives, with its group; return its exit code: negative for the signal that ended it."""
    # The pid is nobody else's before it is waited for.
    os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _run_worker(line: MessageSocket, setup: WorkerSetup | None, work: Callable[[Any], object] | None) -> NoReturn:
    """Answer until the pool closes the socket. An error that is not a UserError ends the process with exit code 1.

    `setup` and `work` are None where the server has not loaded for its workers: each then loads what it is sent.
    """
    exit_code = 1
    try:
        if setup is None or work is None:
            setup = line.receive()
            work = _load_and_report(setup.load, line)
        while True:
            for payload in line.receive():
                result: object
                try:
                    result = work(payload)
                except UserError as error:
                    result = error
                line.send(result, setup.pickler)
    except (EOFError, ConnectionError):
        exit_code = 0
    # SystemExit too: its traceback is all that is left of it.
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # The exit handlers and buffers are the server's: a fork must not run or flush them a second time.
        os._exit(exit_code)
