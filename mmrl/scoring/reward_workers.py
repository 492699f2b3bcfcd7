"""Rewards in processes of their own: each call has a deadline, and one that hangs or dies costs nothing but itself.

    this process ──calls──► worker, worker, ...        each answers call by call, so that the one at fault is known
         └──"another", "bury that one"──► nurse        has loaded the rewards; workers are its forks, made in no time

The nurse is spawned, not forked, so that nothing of this process (torch, CUDA, threads) is in the workers.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from multiprocessing.util import Finalize
from pickle import PicklingError
from typing import NamedTuple

from mmrl.scoring.call import RewardError, RewardOutcome, call_reward
from mmrl.types import Response, RewardErrorKind, RewardFailure, Sample
from mmrl_rewards.contract import BoundReward

_STARTUP_TIMEOUT_S = 60.0
_SHUTDOWN_TIMEOUT_S = 5.0
_MAX_CALLS_PER_WORKER = 32  # that a worker is given at once
_SINGLE_THREAD_ENV = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class RewardCall(NamedTuple):
    """A reward by the name of its term, and what it is to score."""

    term: str
    response: Response
    sample: Sample


@dataclass(slots=True)
class _RewardWorker:
    """A worker and the calls it was given, by their place; the first one is running."""

    pid: int
    pipe: Connection
    assigned: deque[tuple[int, RewardCall]] = field(default_factory=deque)
    deadline: float = 0.0


class RewardWorkers:
    """`count` processes that call rewards; `deadlines` are the seconds a call may take, by term."""

    def __init__(
        self,
        loaders: Mapping[str, Callable[[], BoundReward]],
        timeouts_s: Mapping[str, float],
        num_workers: int,
        warm_up_calls: Sequence[RewardCall] = (),
    ) -> None:
        """The calls of `warm_up` are made once before workers are, so that no deadline has to wait for an import.

        Raises:
            RewardError: the rewards do not load in another process, or do not return from `warm_up`.
        """
        self._timeouts_s, self._num_workers = timeouts_s, num_workers
        self._control, there = Pipe()
        nurse: BaseProcess = get_context("spawn").Process(
            target=_run_fork_server, args=(there, loaders, warm_up_calls), daemon=True
        )
        nurse.start()
        there.close()
        self.close = Finalize(self, _shut_down, (nurse, self._control), exitpriority=0)
        self._idle: list[_RewardWorker] = []
        self._busy = selectors.DefaultSelector()
        self._wait_until_loaded(nurse)

    def run(self, calls: Sequence[RewardCall]) -> list[RewardOutcome]:
        """The outcome of each call, in order. After an error the workers are of no more use.

        Raises:
            RewardError: no worker can be had, or a sample cannot be sent to one.
        """
        waiting = deque(enumerate(calls))
        outcomes: dict[int, RewardOutcome] = {}
        while len(outcomes) < len(calls):
            while waiting and len(self._busy.get_map()) < self._num_workers:
                self._assign_calls(self._idle.pop() if self._idle else self._start_worker(), waiting)
            self._collect_outcomes(waiting, outcomes)
        return [outcomes[place] for place in range(len(calls))]

    def _wait_until_loaded(self, fork_server: BaseProcess) -> None:
        doing: str | None = "starting"
        try:
            while doing:
                if not self._control.poll(_STARTUP_TIMEOUT_S):
                    fork_server.kill()
                    raise RewardError(f"a process for rewards hung while {doing}: more than {_STARTUP_TIMEOUT_S:g} s")
                doing = self._control.recv()
        except (EOFError, ConnectionError):
            raise RewardError(f"a process for rewards died while {doing}; its error, if it had one, is above") from None

    def _start_worker(self) -> _RewardWorker:
        here, there = Pipe()
        try:
            self._control.send(None)
            send_handle(self._control, there.fileno(), None)
            return _RewardWorker(self._control.recv(), here)
        except (EOFError, OSError) as error:
            raise RewardError("rewards: the process that starts workers has died, of too little memory?") from error
        finally:
            there.close()

    def _assign_calls(self, worker: _RewardWorker, waiting: deque[tuple[int, RewardCall]]) -> None:
        """Hand over calls: many at a time, but fewer towards the end, so that no worker is left with the rest."""
        share = max(1, min(_MAX_CALLS_PER_WORKER, len(waiting) // (2 * self._num_workers)))
        worker.assigned.extend(waiting.popleft() for _ in range(share))
        self._set_deadline(worker)
        self._busy.register(worker.pipe, selectors.EVENT_READ, worker)
        try:
            worker.pipe.send([call for _, call in worker.assigned])
        except ConnectionError:  # it died; the pipe's end, when read, says so
            pass
        except (PicklingError, TypeError, AttributeError) as error:
            ids = ", ".join(sorted({call.sample.id for _, call in worker.assigned}))
            raise RewardError(f"cannot send samples {ids:.200} to a worker process: {error}") from error

    def _collect_outcomes(self, waiting: deque[tuple[int, RewardCall]], outcomes: dict[int, RewardOutcome]) -> None:
        """Wait for an outcome or a deadline, and note what there is."""
        workers: list[_RewardWorker] = [key.data for key in self._busy.get_map().values()]
        patience = min(worker.deadline for worker in workers) - time.monotonic()
        ready = [key.data for key, _ in self._busy.select(max(0.0, patience))]
        for worker in ready:
            try:
                outcome = worker.pipe.recv()
            except (EOFError, ConnectionError):
                self._replace_worker(
                    worker, RewardFailure(RewardErrorKind.CRASH, "its process died"), waiting, outcomes
                )
                continue
            outcomes[worker.assigned.popleft()[0]] = outcome
            if worker.assigned:
                self._set_deadline(worker)
            else:
                self._busy.unregister(worker.pipe)
                self._idle.append(worker)
        now = time.monotonic()
        for worker in workers:
            if worker not in ready and worker.deadline <= now:
                limit = self._timeouts_s[worker.assigned[0][1].term]
                self._replace_worker(
                    worker, RewardFailure(RewardErrorKind.TIMEOUT, f"took more than {limit:g} s"), waiting, outcomes
                )

    def _set_deadline(self, worker: _RewardWorker) -> None:
        worker.deadline = time.monotonic() + self._timeouts_s[worker.assigned[0][1].term]

    def _replace_worker(
        self,
        worker: _RewardWorker,
        failure: RewardFailure,
        waiting: deque[tuple[int, RewardCall]],
        outcomes: dict[int, RewardOutcome],
    ) -> None:
        """Blame the running call, take back the others, and let a new worker be made when one is needed."""
        outcomes[worker.assigned.popleft()[0]] = failure
        waiting.extendleft(reversed(worker.assigned))
        self._busy.unregister(worker.pipe)
        worker.pipe.close()
        self._control.send(worker.pid)


def _shut_down(fork_server: BaseProcess, control: Connection) -> None:
    control.close()  # the nurse takes the workers with it
    fork_server.join(_SHUTDOWN_TIMEOUT_S)
    fork_server.kill()


def _run_fork_server(
    control: Connection, loaders: Mapping[str, Callable[[], BoundReward]], warm_up_calls: Sequence[RewardCall]
) -> None:
    """Load the rewards, then make and bury workers for as long as `control` is open."""
    # Signals to the whole process group are the parent's business: it may want to finish and save a step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Libraries that are loaded from here on make no threads: a fork would lose them.
    os.environ.update(_SINGLE_THREAD_ENV)
    rewards: dict[str, BoundReward] = {}
    for name, load in loaders.items():
        control.send(f"loading reward {name!r}")
        rewards[name] = load()
    for call in warm_up_calls:
        control.send(f"scoring sample {call.sample.id!r} with reward {call.term!r}")
        call_reward(rewards[call.term], call.response, call.sample)
    workers: set[int] = set()
    try:
        control.send(None)
        while True:
            if (dead := control.recv()) is None:
                workers.add(_fork_worker(control, rewards))
            else:
                workers.remove(dead)
                _kill_worker(dead)
    except (EOFError, ConnectionError):
        pass
    finally:
        for worker in workers:
            _kill_worker(worker)


def _kill_worker(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)  # until it is waited for, the pid is nobody else's
    os.waitpid(pid, 0)


def _fork_worker(control: Connection, rewards: Mapping[str, BoundReward]) -> int:
    """A worker's pid; in the worker itself this never returns."""
    pipe = Connection(recv_handle(control))
    if pid := os.fork():
        pipe.close()
        control.send(pid)
        return pid
    control.close()
    try:
        _serve_calls(pipe, rewards)
    finally:
        if (error := sys.exception()) and not isinstance(error, EOFError | ConnectionError):
            traceback.print_exception(error)
        os._exit(0)


def _serve_calls(pipe: Connection, rewards: Mapping[str, BoundReward]) -> None:
    while True:
        for call in pipe.recv():
            pipe.send(call_reward(rewards[call.term], call.response, call.sample))
