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

from mmrl.rollout.tools.media_results import ImageCrop, MediaResult, VideoClip, VideoFrames
from mmrl.types import Sample, UserError
from mmrl_rewards.cases import ErrorCatcher

_STARTUP_TIMEOUT_S = 300.0
ToolFunction = Callable[[Mapping[str, Any], Sample], str | MediaResult]


class ToolResult(NamedTuple):
    """What came of a call, what metrics call it, and what is to be shown in place of the text."""

    text: str
    kind: str
    media: MediaResult | None = None


class ToolRequest(NamedTuple):
    """A call of a tool."""

    load_tool: Callable[[], ToolFunction]
    arguments: Mapping[str, Any]
    sample: Sample


class Workers:
    """Processes that call tools, `count` at once, from the first call until they are closed; one that exceeds the
    deadline is killed and replaced.
    """

    def __init__(self, loads: Sequence[Callable[[], ToolFunction]], count: int, deadline_s: float) -> None:
        self._loads, self._deadline_s = tuple(loads), deadline_s
        self._pools: list[multiprocessing.pool.Pool | None] = [None] * count

    def close(self) -> None:
        """End them."""
        for place in range(len(self._pools)):
            self._end(place)

    def run(self, jobs: Sequence[ToolRequest]) -> list[ToolResult]:
        """What came of each, in order."""
        said: list[ToolResult] = []
        waiting = iter(jobs)
        while batch := list(islice(waiting, len(self._pools))):
            said += self._together(batch)
        return said

    def _together(self, batch: Sequence[ToolRequest]) -> list[ToolResult]:
        pools = [self._pool(place) for place in range(len(batch))]
        running = [pool.apply_async(_call_tool, job) for pool, job in zip(pools, batch, strict=True)]
        end = time.monotonic() + self._deadline_s
        return [self._result(place, result, end) for place, result in enumerate(running)]

    def _result(self, place: int, result: AsyncResult[ToolResult], end: float) -> ToolResult:
        result.wait(max(0.0, end - time.monotonic()))
        if result.ready():
            return result.get()
        self._end(place)
        return ToolResult(f"The tool did not answer within {self._deadline_s:g} s.", "timeouts")

    def _pool(self, place: int) -> multiprocessing.pool.Pool:
        """A pool of one process, so that killing it ends one call alone."""
        pool = self._pools[place]
        if pool is None:
            ignore = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which lets the step end
            pool = multiprocessing.get_context("spawn").Pool(1, initializer=signal.signal, initargs=ignore)
            self._pools[place] = pool
            ready = pool.apply_async(_warm_up, (self._loads,))  # no deadline of a call pays for a start and imports
            ready.wait(_STARTUP_TIMEOUT_S)
            if not ready.ready():
                self._end(place)
                raise UserError(
                    f"a process that calls tools is not up within {_STARTUP_TIMEOUT_S:g} s: does a tool's file hang, or end the "
                    "process, as it is imported?"
                )
            ready.get()
        return pool

    def _end(self, place: int) -> None:
        pool, self._pools[place] = self._pools[place], None
        if pool is not None:
            pool.terminate()
            pool.join()


def _warm_up(tool_loaders: Sequence[Callable[[], ToolFunction]]) -> None:
    for load in tool_loaders:
        load()


def _call_tool(load_tool: Callable[[], ToolFunction], arguments: Mapping[str, Any], sample: Sample) -> ToolResult:
    """One call, in a worker."""
    with ErrorCatcher() as caught:
        match load_tool()(arguments, sample):
            case str() as text:
                return ToolResult(text, "answers")
            case ImageCrop() | VideoFrames() | VideoClip() as look:
                return ToolResult("", "answers", look)
            case other:
                return ToolResult(f"The tool returned {other!r:.80}.", "errors")
    match caught.error:
        case ValueError() as error:
            return ToolResult(f"The tool refuses: {error}", "refused")
        case error:
            return ToolResult(f"The tool failed: {type(error).__name__}: {error}", "errors")
