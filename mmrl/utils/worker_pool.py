"""Worker processes. One that hangs past a call's deadline or dies is replaced, and only that call fails.

Rewards, tools, environments, drawings and media run here. `worker_limits` watches memory, processes and output of those
that run functions of users; `worker_server` is the code of the processes.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future
from concurrent.futures import wait as wait_for_futures
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from tempfile import TemporaryFile
from threading import Condition, Event, Lock, Thread, current_thread
from time import monotonic
from typing import Any, Final, Generic, TypeVar

from mmrl.types import UserError
from mmrl.utils.processes import kill_processes, list_tree
from mmrl.utils.worker_limits import WorkerLimits, WorkerWatch
from mmrl.utils.worker_server import (
    CallProgress,
    CallTimeoutError,
    MessageSocket,
    ReportActivity,
    WorkerSetup,
    start_server,
)

PayloadT = TypeVar("PayloadT")
ResultT = TypeVar("ResultT")

STOP_REQUESTED: Final = Event()
"""Set from a request to stop this process (Ctrl-C) until it ends: `wait_for_calls` then gives up calls that hang."""

_SHUTDOWN_TIMEOUT_S, _STOP_PATIENCE_S = 2.0, 2.0
_STOP_PATIENCE_CALLS = 3.0  # times the longest call so far: the time of a judge's reply depends on its length


class WorkerError(Exception):
    """A call has no result because its worker failed."""


class WorkerTimeoutError(WorkerError):
    """The call took longer than its `timeout_s`, so its worker was killed."""


class WorkerLimitError(WorkerError):
    """The worker was killed because it exceeded a limit of `WorkerLimits`, which the message names."""


class WorkerDiedError(WorkerError):
    """The worker ended in the middle of the call."""

    def __init__(self, exit_code: int | None) -> None:
        """Create the error. `exit_code`: negative for a signal, 1 after a printed traceback, None when unknown."""
        self.exit_code = exit_code
        # Messages put the name of the process before this.
        if exit_code is None:
            super().__init__("ended together with its pool")
        elif exit_code < 0:
            super().__init__(f"was killed by {signal.Signals(-exit_code).name}")
        else:
            super().__init__(f"ended with exit code {exit_code}")


class WorkerStartError(WorkerError):
    """No worker could be started. The message says what hung or died; `__cause__` is the loader's UserError, if any."""


class WorkerPool(Generic[PayloadT, ResultT]):
    """Up to `num_workers` processes, which start when there is work for them and stay until `close`."""

    def __init__(
        self,
        load: Callable[[ReportActivity], Callable[[PayloadT], ResultT]],
        num_workers: int,
        *,
        limits: WorkerLimits,
        shared_imports: tuple[str, ...] | None = None,
        max_batch_size: int = 1,
        fork_each_call: bool = False,
        pickler: type[pickle.Pickler] = pickle.Pickler,
        make_error: Callable[[PayloadT, WorkerError], Exception] | None = None,
    ) -> None:
        """Start the server process, without waiting for it to load.

        Args:
            load: returns the function that workers apply to payloads. It must be picklable, runs in the server, and is
                given a function that reports what it does next.
            num_workers: calls that run at the same time.
            limits: limits of each worker. With `reads_output`, this process reads the output, and shows it escaped.
            shared_imports: run `load` in every worker instead, forked from a server that has imported these modules.
                Then `load` may start threads, and pools with the same modules and limits share one server. Replacing a
                worker takes longer. None: `load` runs in a server of this pool.
            max_batch_size: calls that a worker is sent at once, to save time; each still has its own deadline.
            fork_each_call: never give a process a second call.
            pickler: pickles results; a subclass may send objects as arrays.
            make_error: turns the WorkerError of a payload into the error that its future raises.
        """
        setup = WorkerSetup(load, pickler)
        if shared_imports is None:
            self._workers = _WorkerStarter(_Server((), setup, limits), None, limits)
        else:
            server = _share_server(os.getpid(), shared_imports, limits)
            self._workers = _WorkerStarter(server, setup, limits)
        self._queue = _TaskQueue(num_workers, max_batch_size)
        self._threads: list[Thread] = []
        self._num_workers, self._fork_each_call, self._make_error = num_workers, fork_each_call, make_error
        # Finalize must not hold the pool itself, or the pool would never be collected.
        # Runs at the latest when the interpreter exits, but not in a fork of this process, which does not own the pool.
        self.close = Finalize(self, _close, (self._queue, self._workers, self._threads), exitpriority=0)

    def wait_until_ready(self) -> None:
        """Wait until the server has loaded. Without this, the first call waits for it. Raises WorkerStartError."""
        self._workers.server.wait_until_ready()

    def submit(self, payload: PayloadT, timeout_s: float | None = None) -> Future[ResultT]:
        """Return the future result of one call. Calls begin in the order in which they are submitted.

        The future raises a UserError that the call raised. It raises WorkerError, or the error that `make_error` makes
        of it, if the call took more than `timeout_s` seconds (by default the limits' `call_timeout_s`), its process
        exceeded a limit or died, or no process can be started.
        """
        return self.submit_all([payload], [timeout_s])[0]

    def submit_all(self, payloads: Sequence[PayloadT], timeouts_s: Sequence[float | None]) -> list[Future[ResultT]]:
        """Submit calls together, so that they can be sent in batches. The futures raise like those of `submit`."""
        tasks = []
        for payload, timeout_s in zip(payloads, timeouts_s, strict=True):
            tasks.append(_Task[Any](payload, timeout_s or self._workers.limits.call_timeout_s, self._make_error))
        self._queue.add(tasks)
        while len(self._threads) < min(self._num_workers, self._queue.num_submitted):
            arguments = (self._queue, self._workers, self._fork_each_call)
            self._threads.append(Thread(target=_run_tasks, args=arguments, daemon=True, name="worker-pool"))
            self._threads[-1].start()
        return [task.future for task in tasks]

    def wait_for_calls(self, futures: Sequence[Future[Any]], *, stop_at_error: bool = False) -> None:
        """Wait until all calls are over, or with `stop_at_error` until one of them has raised.

        Raises:
            KeyboardInterrupt: this process is to stop, and no call has ended for the longer of two seconds and three
                times the longest call so far, so that slow calls do not count as hung.
        """
        pending, silent_s = set(futures), 0.0
        until = FIRST_EXCEPTION if stop_at_error else ALL_COMPLETED
        while pending:
            # One wake-up for all: waking up for each would take longer than most calls.
            done, pending = wait_for_futures(pending, _STOP_PATIENCE_S, until)
            if stop_at_error and any(future.exception() for future in done):
                return
            silent_s = 0.0 if done else silent_s + _STOP_PATIENCE_S
            patience_s = max(_STOP_PATIENCE_S, _STOP_PATIENCE_CALLS * self._queue.longest_call_s)
            if pending and silent_s >= patience_s and STOP_REQUESTED.is_set():
                raise KeyboardInterrupt


@dataclass(slots=True)
class _Task(Generic[ResultT]):
    """One call and its future."""

    payload: Any
    timeout_s: float | None
    make_error: Callable[[Any, WorkerError], Exception] | None
    future: Future[ResultT] = field(default_factory=Future)

    def fail(self, error: Exception | SystemExit) -> None:
        """Let the future raise an error, in the words of the pool's owner."""
        if isinstance(error, WorkerError) and self.make_error is not None:
            error = self.make_error(self.payload, error)
        self.future.set_exception(error)


class _TaskQueue:
    """The tasks that no worker has taken yet."""

    def __init__(self, num_workers: int, max_batch_size: int) -> None:
        self.num_submitted = 0
        self.longest_call_s = 0.0  # of all calls that returned
        self._num_workers, self._max_batch_size = num_workers, max_batch_size
        self._waiting: deque[_Task[Any]] = deque()
        self._changed = Condition()
        self._closed = False

    def add(self, tasks: Sequence[_Task[Any]]) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError("the worker pool is closed")
            self.num_submitted += len(tasks)
            self._waiting.extend(tasks)
            self._changed.notify(len(tasks))

    def put_back(self, tasks: Sequence[_Task[Any]]) -> None:
        """Let tasks that were taken but not begun be the next ones."""
        with self._changed:
            self._waiting.extendleft(reversed(tasks))
            self._changed.notify(len(tasks))
            if self._closed:
                self._cancel_all()

    def take(self) -> list[_Task[Any]]:
        """Wait for tasks and return a batch for one worker; empty once the queue is closed."""
        taken: list[_Task[Any]] = []
        with self._changed:
            while not taken and not self._closed:
                # Fewer towards the end, so that no worker is left with the rest while others idle.
                size = max(1, min(self._max_batch_size, len(self._waiting) // (2 * self._num_workers)))
                while self._waiting and len(taken) < size:
                    task = self._waiting.popleft()
                    # A task that was put back counts as running. A new one is left out if its future was cancelled.
                    if task.future.running() or task.future.set_running_or_notify_cancel():
                        taken.append(task)
                if not taken and not self._waiting:
                    self._changed.wait()
        return taken

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._cancel_all()
            self._changed.notify_all()

    def _cancel_all(self) -> None:
        for task in self._waiting:
            if task.future.running():
                task.fail(WorkerDiedError(None))
            else:
                task.future.cancel()
        self._waiting.clear()


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker process and the connection to it."""

    pid: int
    line: MessageSocket
    progress: CallProgress


class _Server:
    """The process that forks workers. Its methods may be called from any thread."""

    def __init__(self, imports: tuple[str, ...], setup: WorkerSetup | None, limits: WorkerLimits) -> None:
        """Start the process, which imports these modules and then loads for its workers, unless `setup` is None."""
        self._ready = False
        self._start_error: WorkerStartError | None = None
        self._lock = Lock()
        self._limits = limits
        self.watch: WorkerWatch | None = None
        ours, theirs = socket.socketpair()
        self._control = MessageSocket(ours)
        # None: the server writes to this process's output.
        output_fds = os.pipe() if limits.reads_output else None
        with theirs:
            self._process = start_server(theirs.fileno(), output_fds[1] if output_fds else None)
        if output_fds is not None:
            os.close(output_fds[1])
            self.watch = WorkerWatch(self._process.pid, output_fds[0], limits)
        self.close = Finalize(self, _end_server, (self._process, self._control, self.watch), exitpriority=0)
        try:
            self._control.send(imports)
            self._control.send(setup)
        except ConnectionError:
            pass  # the server died, as `wait_until_ready` reports
        # The setup cannot be pickled, or somebody pressed Ctrl-C.
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self) -> None:
        """Return when the server has loaded; WorkerStartError if it hung or died, now or before."""
        with self._lock:
            if self._start_error is not None:
                raise self._start_error
            if not self._ready:
                try:
                    self.wait_until_loaded(self._process.pid, self._control)
                except WorkerStartError as error:
                    # A socket that has timed out in the middle of a read cannot be read again.
                    self._start_error = error
                    raise
                self._ready = True
                if self.watch is not None:
                    self.watch.is_loading = False

    def wait_until_loaded(self, pid: int, line: MessageSocket) -> None:
        """Return when the server or a worker that loads for itself has loaded; WorkerStartError if it hung or died."""
        timeout_s = self._limits.startup_timeout_s
        # For the error message: what the loader did last.
        activity = "starting"
        try:
            report = line.receive(timeout_s)
            while report is not None:
                if isinstance(report, UserError):
                    raise WorkerStartError(f"died while {activity}: {report}") from report
                activity, own_timeout_s = report
                timeout_s = self._limits.startup_timeout_s if own_timeout_s is None else own_timeout_s
                report = line.receive(timeout_s)
        except TimeoutError:
            raise WorkerStartError(f"hung while {activity}: more than {timeout_s:g} s without a report") from None
        except (EOFError, ConnectionError):
            reason = self.take_reason(pid)
            if reason is not None:
                raise WorkerStartError(f"was killed while {activity}: it {reason}") from None
            raise WorkerStartError(f"died while {activity}; its error, if it had one, is above") from None

    def take_reason(self, pid: int) -> str | None:
        """Return and forget the limit for which a process was killed; None if it was not."""
        return None if self.watch is None else self.watch.reasons.pop(pid, None)

    def fork_worker(self) -> _Worker:
        ours, theirs = socket.socketpair()
        try:
            with self._lock, theirs, TemporaryFile() as shared:
                progress = CallProgress(shared.fileno())
                socket.send_fds(self._control.connection, [b"f"], [theirs.fileno(), shared.fileno()])
                worker = _Worker(self._control.receive(), MessageSocket(ours), progress)
                if self.watch is not None:
                    self.watch.workers.add(worker.pid)
                return worker
        except (EOFError, OSError) as error:
            ours.close()
            raise WorkerStartError("died after it was ready; memory may have run out") from error

    def end_worker(self, worker: _Worker) -> int | None:
        """Kill a worker and return its exit code, None when the server is gone."""
        with self._lock:
            if self.watch is not None:
                self.watch.workers.discard(worker.pid)
            try:
                self._control.connection.sendall(b"e")
                self._control.send(worker.pid)
                exit_code: int = self._control.receive()
                return exit_code
            except (EOFError, OSError):
                return None


class _WorkerStarter:
    """Starts and ends the workers of one pool."""

    def __init__(self, server: _Server, setup: WorkerSetup | None, limits: WorkerLimits) -> None:
        """Store the server; `setup` is sent to each worker, and is None where the server has loaded for all."""
        self.server, self.limits = server, limits
        # A server that loaded for its workers is used by no other pool.
        self.owns_server = setup is None
        self._setup = setup
        self._lock = Lock()
        self._living: set[int] = set()

    def start(self) -> _Worker:
        """Return a worker that has loaded; WorkerStartError if it or the server hung or died meanwhile."""
        self.server.wait_until_ready()
        worker = self.server.fork_worker()
        with self._lock:
            self._living.add(worker.pid)
        if self._setup is not None:
            try:
                # After a ConnectionError the worker is dead, as `wait_until_loaded` reports.
                with suppress(ConnectionError):
                    worker.line.send(self._setup)
                self.server.wait_until_loaded(worker.pid, worker.line)
            except WorkerStartError:
                self.end(worker)
                raise
        return worker

    def end(self, worker: _Worker) -> int | None:
        with self._lock:
            # Once the server has waited for the worker, its pid may be reused, so `kill_all` must not kill it.
            self._living.discard(worker.pid)
        worker.line.close()
        exit_code = self.server.end_worker(worker)
        # A server that was killed left the worker behind.
        if exit_code is None and self.server.close.still_active():
            kill_processes([worker.pid])
        return exit_code

    def kill_all(self) -> None:
        """Kill all workers; the threads that wait for them end them in turn."""
        with self._lock:
            kill_processes(tuple(self._living))


@cache
def _share_server(process_id: int, imports: tuple[str, ...], limits: WorkerLimits) -> _Server:
    """Return the server of all pools of this process that load after the fork."""
    # The id is only a part of the cache's key: a fork of this process needs its own server.
    del process_id
    return _Server(imports, None, limits)


def _run_tasks(queue: _TaskQueue, workers: _WorkerStarter, fork_each_call: bool) -> None:
    """Keep one worker busy until the queue is closed. Each worker has its own thread, which runs this."""
    worker: _Worker | None = None
    while tasks := queue.take():
        # An idle worker sends nothing, so its socket becomes readable only when it has died.
        if worker is not None and wait([worker.line.connection], timeout=0.0):
            workers.end(worker)
            worker = None
        try:
            worker = worker or workers.start()
        except (Exception, SystemExit) as error:  # noqa: BLE001  # if this thread ended, callers would wait for ever
            for task in tasks:
                task.fail(error)
            continue
        worker = _run_batch(tasks, worker, queue, workers)
        if worker is not None and fork_each_call:
            workers.end(worker)
            worker = None
    if worker is not None:
        workers.end(worker)


def _run_batch(tasks: list[_Task[Any]], worker: _Worker, queue: _TaskQueue, workers: _WorkerStarter) -> _Worker | None:
    """Run tasks in a worker and return it; None if it hung or died, which fails one task and puts the rest back."""
    worker.progress.begin(0)
    try:
        worker.line.send([task.payload for task in tasks])
    except ConnectionError:
        pass  # the worker is dead, as `receive_results` reports
    except (Exception, SystemExit) as unsent:  # noqa: BLE001  # pickling calls code of the payloads
        for task in tasks:
            task.fail(unsent)
        return worker
    num_done = 0
    while num_done < len(tasks):
        start = monotonic()
        try:
            results = worker.progress.receive_results(worker.line, [task.timeout_s for task in tasks])
        except (Exception, SystemExit) as error:  # noqa: BLE001  # unpickling calls code of the results
            failed = _end_and_fail_call(error, tasks, num_done, worker, workers)
            # Calls of the last milliseconds, whose results were not sent, are made again.
            queue.put_back([*tasks[num_done:failed], *tasks[failed + 1 :]])
            return None
        # Includes a few milliseconds for other results that were sent together with the longest call's.
        queue.longest_call_s = max(queue.longest_call_s, monotonic() - start)
        for task, result in zip(tasks[num_done:], results, strict=False):
            if isinstance(result, UserError):
                task.fail(result)
            else:
                task.future.set_result(result)
        num_done += len(results)
    return worker


def _end_and_fail_call(
    error: Exception | SystemExit, tasks: list[_Task[Any]], num_done: int, worker: _Worker, workers: _WorkerStarter
) -> int:
    """End a worker that sent `num_done` results and no more; fail the call to blame, and return that call's number."""
    exit_code = workers.end(worker)
    limit = workers.server.take_reason(worker.pid)
    # Read after the worker has ended: it begins no further call. One that died between two calls fails the next.
    failed = max(num_done, worker.progress.read()[0])
    if limit is not None:
        error = WorkerLimitError(limit)
    elif isinstance(error, CallTimeoutError):
        failed = error.args[0]
        error = WorkerTimeoutError(f"took more than {tasks[failed].timeout_s:g} s")
    elif isinstance(error, EOFError | OSError):
        error = WorkerDiedError(exit_code)
    tasks[failed].fail(error)
    return failed


def _close(queue: _TaskQueue, workers: _WorkerStarter, threads: Sequence[Thread]) -> None:
    queue.close()
    workers.kill_all()
    if workers.owns_server:
        workers.server.close()
    for thread in threads:
        # The pool may have been garbage-collected in one of its own threads, which cannot wait for itself.
        if thread is not current_thread():
            thread.join(_SHUTDOWN_TIMEOUT_S)


def _end_server(process: subprocess.Popen[bytes], control: MessageSocket, watch: WorkerWatch | None) -> None:
    """End a server, which takes its workers with it."""
    with suppress(OSError):  # it is gone already
        control.connection.shutdown(socket.SHUT_RDWR)
    try:
        process.wait(_SHUTDOWN_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # it hangs in code of a user, which may have started processes
        kill_processes(list_tree(process.pid))
        process.wait()
    control.close()
    if watch is not None:
        watch.close()
