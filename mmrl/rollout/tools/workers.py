"""Calls of tools, each in a process that can be killed. Nothing heavy is loaded here: the processes start with it."""

from __future__ import annotations

import multiprocessing
import multiprocessing.pool
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from multiprocessing.pool import AsyncResult
from typing import Any, NamedTuple

from mmrl.rollout.tools.media_results import Frames, Look, Passage, Zoom
from mmrl.types import Sample, UserError
from mmrl_rewards.cases import Caught

_START_S = 300.0
Tool = Callable[[Mapping[str, Any], Sample], str | Look]


class Said(NamedTuple):
    """What came of a call, what metrics call it, and what is to be shown in place of the text."""

    text: str
    kind: str
    look: Look | None = None


class Job(NamedTuple):
    """A call of a tool."""

    load: Callable[[], Tool]
    arguments: Mapping[str, Any]
    sample: Sample


class Workers:
    """Processes that call tools, `count` at once, from the first call until they are closed; one that exceeds the
    deadline is killed and replaced.
    """

    def __init__(self, loads: Sequence[Callable[[], Tool]], count: int, deadline_s: float) -> None:
        self._loads, self._deadline_s = tuple(loads), deadline_s
        self._pools: list[multiprocessing.pool.Pool | None] = [None] * count

    def close(self) -> None:
        """End them."""
        for place in range(len(self._pools)):
            self._end(place)

    def run(self, jobs: Sequence[Job]) -> list[Said]:
        """What came of each, in order."""
        said: list[Said] = []
        waiting = iter(jobs)
        while batch := list(islice(waiting, len(self._pools))):
            said += self._together(batch)
        return said

    def _together(self, batch: Sequence[Job]) -> list[Said]:
        pools = [self._pool(place) for place in range(len(batch))]
        running = [pool.apply_async(_call, job) for pool, job in zip(pools, batch, strict=True)]
        end = time.monotonic() + self._deadline_s
        return [self._result(place, result, end) for place, result in enumerate(running)]

    def _result(self, place: int, result: AsyncResult[Said], end: float) -> Said:
        result.wait(max(0.0, end - time.monotonic()))
        if result.ready():
            return result.get()
        self._end(place)
        return Said(f"The tool did not answer within {self._deadline_s:g} s.", "timeouts")

    def _pool(self, place: int) -> multiprocessing.pool.Pool:
        """A pool of one process, so that killing it ends one call alone."""
        pool = self._pools[place]
        if pool is None:
            ignore = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which lets the step end
            pool = multiprocessing.get_context("spawn").Pool(1, initializer=signal.signal, initargs=ignore)
            self._pools[place] = pool
            ready = pool.apply_async(_warm_up, (self._loads,))  # no deadline of a call pays for a start and imports
            ready.wait(_START_S)
            if not ready.ready():
                self._end(place)
                raise UserError(
                    f"a process that calls tools is not up within {_START_S:g} s: does a tool's file hang, or end the "
                    "process, as it is imported?"
                )
            ready.get()
        return pool

    def _end(self, place: int) -> None:
        pool, self._pools[place] = self._pools[place], None
        if pool is not None:
            pool.terminate()
            pool.join()


def _warm_up(loads: Sequence[Callable[[], Tool]]) -> None:
    for load in loads:
        load()


def _call(load: Callable[[], Tool], arguments: Mapping[str, Any], sample: Sample) -> Said:
    """One call, in a worker."""
    with Caught() as caught:
        match load()(arguments, sample):
            case str() as text:
                return Said(text, "answers")
            case Zoom() | Frames() | Passage() as look:
                return Said("", "answers", look)
            case other:
                return Said(f"The tool returned {other!r:.80}.", "errors")
    match caught.error:
        case ValueError() as error:
            return Said(f"The tool refuses: {error}", "refused")
        case error:
            return Said(f"The tool failed: {type(error).__name__}: {error}", "errors")
