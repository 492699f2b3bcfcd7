"""Processes that open media while this one does something else. One that dies takes no more with it than its item."""

from __future__ import annotations

import io
import pickle
import signal
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import BufferedRWPair
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from queue import SimpleQueue
from threading import Lock
from typing import Any, Generic, TypeVar, cast

import torch

from mmrl.types import UserError

ItemT = TypeVar("ItemT")
FeedT = TypeVar("FeedT")

# An exit code comes through a pipe that every start and every look at a process reads, for all processes: of two
# threads that read it at once, one finds it empty and writes down 255.
_EXIT_CODES = Lock()


class Workers(Generic[ItemT, FeedT]):
    """`count` processes that apply `work`, each watched by a thread, so a death is known to belong to one item.

    `work` is sent to each process once and must be picklable. Processes are forked from a server that has loaded
    this package's libraries, not from here: threads and CUDA do not survive a fork.
    """

    def __init__(self, work: Callable[[ItemT], FeedT], count: int, *, name: Callable[[ItemT], str]) -> None:
        """`name` is what errors call an item: `sample x`, or a file."""
        context = get_context("forkserver")
        context.set_forkserver_preload(["mmrl.policy.processor"])
        self._start: Callable[[], _Worker[ItemT, FeedT]] = partial(_Worker, context, work, name)
        self._idle: SimpleQueue[_Worker[ItemT, FeedT]] = SimpleQueue()
        self._workers = [self._start() for _ in range(count)]
        for worker in self._workers:
            self._idle.put(worker)
        self._watchers = ThreadPoolExecutor(count, thread_name_prefix="media")

    def submit(self, item: ItemT) -> Future[FeedT]:
        """The feed of an item, to come; items are begun in the order they are submitted.

        The future raises what `work` raised of UserErrors, UserError naming the item where a signal killed the process
        (a crash in a decoder, memory running out), and RuntimeError where `work` failed in any other way.
        """
        return self._watchers.submit(self._process, item)

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._watchers.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.stop()
        self._watchers.shutdown()

    def _process(self, item: ItemT) -> FeedT:
        worker = self._idle.get()
        try:
            if not worker.alive:
                self._workers.remove(worker)
                worker = self._start()
                self._workers.append(worker)
            return worker.process(item)
        finally:
            self._idle.put(worker)


class _Worker(Generic[ItemT, FeedT]):
    """One process and the line to it."""

    def __init__(
        self, context: ForkServerContext, work: Callable[[ItemT], FeedT], name: Callable[[ItemT], str]
    ) -> None:
        self._name = name
        ours, theirs = socket.socketpair()
        with ours:
            self._line = ours.makefile("rwb")
        self._child = context.Process(target=_serve, args=(work, theirs), daemon=True)
        with _EXIT_CODES:
            self._child.start()
        theirs.close()  # so that its end is felt here

    @property
    def alive(self) -> bool:
        with _EXIT_CODES:
            return self._child.is_alive()

    def process(self, item: ItemT) -> FeedT:
        try:
            pickle.dump(item, self._line)
            self._line.flush()
            answer = _receive(self._line)
        except (EOFError, OSError) as error:
            raise self._obituary(item) from error
        if isinstance(answer, UserError):
            raise answer
        return cast("FeedT", answer)

    def stop(self) -> None:
        with _EXIT_CODES:
            self._child.terminate()
            self._child.join()

    def _obituary(self, item: ItemT) -> UserError | RuntimeError:
        with _EXIT_CODES:
            self._child.join()
            code = self._child.exitcode or 0
        if code == 1:
            return RuntimeError(f"{self._name(item)}: the process that opened it failed; its traceback stands above")
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return UserError(
            f"{self._name(item)}: the process that opened it {end}; a file crashes its decoder, or memory ran out: "
            "look at the file, or lower data.workers"
        )


def _serve(work: Callable[[Any], object], line: socket.socket) -> None:
    """Answer items with feeds until the other end of the line closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent decides
    torch.set_num_threads(1)
    answer: object
    with suppress(EOFError, ConnectionError), line.makefile("rwb") as file:
        while True:
            item = pickle.load(file)
            try:
                answer = work(item)
            except UserError as error:
                answer = error
            _send(answer, file)


class _Pickler(pickle.Pickler):
    """Tensors go as arrays, whose numbers are sent from where they stand and received where they stay: one copy, and
    no shared memory, of which containers have little.
    """

    def reducer_override(self, obj: object) -> Any:  # noqa: ANN401
        if isinstance(obj, torch.Tensor):
            return torch.from_numpy, (obj.numpy(),)
        return NotImplemented


def _send(message: object, file: BufferedRWPair) -> None:
    body, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(body, protocol=5, buffer_callback=buffers.append).dump(message)
    views = [buffer.raw() for buffer in buffers]
    pickle.dump((body.getvalue(), [view.nbytes for view in views]), file)
    for view in views:
        file.write(view)
    file.flush()


def _receive(file: BufferedRWPair) -> object:
    body, sizes = pickle.load(file)
    buffers = [bytearray(size) for size in sizes]
    for buffer in buffers:
        if file.readinto(buffer) < len(buffer):
            raise EOFError
    return pickle.loads(body, buffers=buffers)
