"""Tool calls in worker processes that can be killed. Nothing heavy is imported here: every process imports it.

Each step with tools has `workers` processes on every rank, which start at the first call. A call that takes longer than
`timeout_s` hangs: its process is killed and replaced, and the model is told that the tool did not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mmrl.types import Action, ImageCrop, MediaResult, Sample, UserError, VideoClip, VideoFrames
from mmrl.utils.observations import check_media_result, encodable
from mmrl.utils.plugins import load_plugin
from mmrl.utils.worker_limits import STARTUP_TIMEOUT_S, WorkerLimits
from mmrl.utils.worker_pool import WorkerDiedError, WorkerLimitError, WorkerPool, WorkerStartError, WorkerTimeoutError
from mmrl.utils.worker_server import ReportActivity

if TYPE_CHECKING:
    from mmrl.config.schema import ToolConfig, ToolsConfig

ToolFunction = Callable[[Mapping[str, Any], Sample], str | MediaResult]


class ToolResult(NamedTuple):
    """The reply to one tool call."""

    text: str  # goes back to the model, unless there are media
    kind: str  # the name of the metric that counts the reply
    media: MediaResult | None = None  # images or a video to show instead of the text


class ToolRequest(NamedTuple):
    """One call of a tool."""

    call: Action
    sample: Sample


def load_tool(base: Path, options: ToolConfig) -> ToolFunction:
    """Return the tool that the config names, with its options bound. Raises as `load_plugin`."""
    return load_plugin(options.fn, base, options.args, role="tool", parameters=("call", "sample"))


@dataclass(slots=True)
class ToolWorkers:
    """Runs the tools of a step in processes, from the first call until `close`."""

    base_dir: Path  # folder that relative files of tools start from
    options: ToolsConfig
    _pool: WorkerPool[ToolRequest, ToolResult] | None = None

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def run(self, requests: Sequence[ToolRequest]) -> list[ToolResult]:
        """Return the result of each call, in order.

        Raises:
            UserError: a process cannot be started, or a tool cannot be loaded.
            KeyboardInterrupt: this process was asked to stop while a tool hangs.
        """
        options = self.options
        if self._pool is None:
            self._pool = WorkerPool(
                partial(_load_tools, self.base_dir, options.tools),
                options.workers,
                limits=WorkerLimits(STARTUP_TIMEOUT_S, reads_output=True, **options.worker_limits.model_dump()),
                # A tool's file may start threads or open connections, which a fork would lose.
                shared_imports=(),
            )
        futures = self._pool.submit_all(requests, [options.timeout_s] * len(requests))
        self._pool.wait_for_calls(futures)
        results = []
        for future in futures:
            try:
                results.append(future.result())
            except (WorkerTimeoutError, WorkerDiedError):
                # One message for both: the model could do nothing about a tool that ended its process.
                results.append(ToolResult(f"The tool did not answer within {options.timeout_s:g} s.", "timeouts"))
            except WorkerLimitError as error:
                results.append(ToolResult(f"The tool was stopped: it {error}.", "limits"))
            except WorkerStartError as error:
                raise explain_start_error(error, "a tool's file") from error
        return results


def explain_start_error(error: WorkerStartError, file: str) -> UserError:
    """Return the UserError that loading `file`, such as "a tool's file", raised, or one about the process."""
    if isinstance(error.__cause__, UserError):
        return error.__cause__
    return UserError(f"a process for {file} {error}: does the file hang, or end the process, as it is imported?")


def _load_tools(
    base_dir: Path, tools: Sequence[ToolConfig], report: ReportActivity
) -> Callable[[ToolRequest], ToolResult]:
    """Load all tools before the first call, so that loading does not count toward the call's deadline."""
    report("loading tools")
    return partial(_call_tool, {tool.call_name: load_tool(base_dir, tool) for tool in tools})


def _call_tool(tools: Mapping[str, ToolFunction], request: ToolRequest) -> ToolResult:
    # An error of the user's code is an outcome of the call, not of the worker.
    try:
        match tools[request.call.name](request.call.arguments, request.sample):
            case str() as text:
                return ToolResult(encodable(text), "results")
            case ImageCrop() | VideoFrames() | VideoClip() as media:
                check_media_result(media)
                return ToolResult("", "results", media)
            case other:
                return ToolResult(f"The tool returned {other!r:.80}.", "errors")
    except ValueError as error:
        return ToolResult(encodable(f"The tool refuses: {error}"), "refused")
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return ToolResult(encodable(f"The tool failed: {type(error).__name__}: {error}"), "errors")
