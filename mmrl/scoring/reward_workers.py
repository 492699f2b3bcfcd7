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

from mmrl.scoring.call import Outcome, RewardError, attempt
from mmrl.types import Failure, Fault, Response, Sample
from mmrl_rewards.contract import BoundReward

_START_S = 60.0
_END_S = 5.0
_MOST_CALLS = 32  # that a worker is given at once
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Call(NamedTuple):
    """A reward by the name of its term, and what it is to score."""

    term: str
    response: Response
    sample: Sample


@dataclass(slots=True)
class _Worker:
    """A worker and the calls it was given, by their place; the first one is running."""

    pid: int
    pipe: Connection
    given: deque[tuple[int, Call]] = field(default_factory=deque)
    due: float = 0.0


class Workers:
    """`count` processes that call rewards; `deadlines` are the seconds a call may take, by term."""

    def __init__(
        self,
        loads: Mapping[str, Callable[[], BoundReward]],
        deadlines: Mapping[str, float],
        count: int,
        warm_up: Sequence[Call] = (),
    ) -> None:
        """The calls of `warm_up` are made once before workers are, so that no deadline has to wait for an import.

        Raises:
            RewardError: the rewards do not load in another process, or do not return from `warm_up`.
        """
        self._deadlines, self._count = deadlines, count
        self._control, there = Pipe()
        nurse: BaseProcess = get_context("spawn").Process(target=_nurse, args=(there, loads, warm_up), daemon=True)
        nurse.start()
        there.close()
        self.close = Finalize(self, _end, (nurse, self._control), exitpriority=0)
        self._idle: list[_Worker] = []
        self._busy = selectors.DefaultSelector()
        self._await(nurse)

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """The outcome of each call, in order. After an error the workers are of no more use.

        Raises:
            RewardError: no worker can be had, or a sample cannot be sent to one.
        """
        waiting = deque(enumerate(calls))
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(calls):
            while waiting and len(self._busy.get_map()) < self._count:
                self._give(self._idle.pop() if self._idle else self._new(), waiting)
            self._collect(waiting, outcomes)
        return [outcomes[place] for place in range(len(calls))]

    def _await(self, nurse: BaseProcess) -> None:
        doing: str | None = "starting"
        try:
            while doing:
                if not self._control.poll(_START_S):
                    nurse.kill()
                    raise RewardError(f"a process for rewards hung while {doing}: more than {_START_S:g} s")
                doing = self._control.recv()
        except (EOFError, ConnectionError):
            raise RewardError(f"a process for rewards died while {doing}; its error, if it had one, is above") from None

    def _new(self) -> _Worker:
        here, there = Pipe()
        try:
            self._control.send(None)
            send_handle(self._control, there.fileno(), None)
            return _Worker(self._control.recv(), here)
        except (EOFError, OSError) as error:
            raise RewardError("rewards: the process that starts workers has died, of too little memory?") from error
        finally:
            there.close()

    def _give(self, worker: _Worker, waiting: deque[tuple[int, Call]]) -> None:
        """Hand over calls: many at a time, but fewer towards the end, so that no worker is left with the rest."""
        share = max(1, min(_MOST_CALLS, len(waiting) // (2 * self._count)))
        worker.given.extend(waiting.popleft() for _ in range(share))
        self._expect(worker)
        self._busy.register(worker.pipe, selectors.EVENT_READ, worker)
        try:
            worker.pipe.send([call for _, call in worker.given])
        except ConnectionError:  # it died; the pipe's end, when read, says so
            pass
        except (PicklingError, TypeError, AttributeError) as error:
            ids = ", ".join(sorted({call.sample.id for _, call in worker.given}))
            raise RewardError(f"cannot send samples {ids:.200} to a worker process: {error}") from error

    def _collect(self, waiting: deque[tuple[int, Call]], outcomes: dict[int, Outcome]) -> None:
        """Wait for an outcome or a deadline, and note what there is."""
        workers: list[_Worker] = [key.data for key in self._busy.get_map().values()]
        patience = min(worker.due for worker in workers) - time.monotonic()
        ready = [key.data for key, _ in self._busy.select(max(0.0, patience))]
        for worker in ready:
            try:
                outcome = worker.pipe.recv()
            except (EOFError, ConnectionError):
                self._replace(worker, Failure(Fault.DEATH, "its process died"), waiting, outcomes)
                continue
            outcomes[worker.given.popleft()[0]] = outcome
            if worker.given:
                self._expect(worker)
            else:
                self._busy.unregister(worker.pipe)
                self._idle.append(worker)
        now = time.monotonic()
        for worker in workers:
            if worker not in ready and worker.due <= now:
                limit = self._deadlines[worker.given[0][1].term]
                self._replace(worker, Failure(Fault.TIMEOUT, f"took more than {limit:g} s"), waiting, outcomes)

    def _expect(self, worker: _Worker) -> None:
        worker.due = time.monotonic() + self._deadlines[worker.given[0][1].term]

    def _replace(
        self, worker: _Worker, failure: Failure, waiting: deque[tuple[int, Call]], outcomes: dict[int, Outcome]
    ) -> None:
        """Blame the running call, take back the others, and let a new worker be made when one is needed."""
        outcomes[worker.given.popleft()[0]] = failure
        waiting.extendleft(reversed(worker.given))
        self._busy.unregister(worker.pipe)
        worker.pipe.close()
        self._control.send(worker.pid)


def _end(nurse: BaseProcess, control: Connection) -> None:
    control.close()  # the nurse takes the workers with it
    nurse.join(_END_S)
    nurse.kill()


def _nurse(control: Connection, loads: Mapping[str, Callable[[], BoundReward]], warm_up: Sequence[Call]) -> None:
    """Load the rewards, then make and bury workers for as long as `control` is open."""
    # Signals to the whole process group are the parent's business: it may want to finish and save a step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Libraries that are loaded from here on make no threads: a fork would lose them.
    os.environ.update(_THREADS)
    rewards: dict[str, BoundReward] = {}
    for name, load in loads.items():
        control.send(f"loading reward {name!r}")
        rewards[name] = load()
    for call in warm_up:
        control.send(f"scoring sample {call.sample.id!r} with reward {call.term!r}")
        attempt(rewards[call.term], call.response, call.sample)
    workers: set[int] = set()
    try:
        control.send(None)
        while True:
            if (dead := control.recv()) is None:
                workers.add(_forked(control, rewards))
            else:
                workers.remove(dead)
                _bury(dead)
    except (EOFError, ConnectionError):
        pass
    finally:
        for worker in workers:
            _bury(worker)


def _bury(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)  # until it is waited for, the pid is nobody else's
    os.waitpid(pid, 0)


def _forked(control: Connection, rewards: Mapping[str, BoundReward]) -> int:
    """A worker's pid; in the worker itself this never returns."""
    pipe = Connection(recv_handle(control))
    if pid := os.fork():
        pipe.close()
        control.send(pid)
        return pid
    control.close()
    try:
        _serve(pipe, rewards)
    finally:
        if (error := sys.exception()) and not isinstance(error, EOFError | ConnectionError):
            traceback.print_exception(error)
        os._exit(0)


def _serve(pipe: Connection, rewards: Mapping[str, BoundReward]) -> None:
    while True:
        for call in pipe.recv():
            pipe.send(attempt(rewards[call.term], call.response, call.sample))
