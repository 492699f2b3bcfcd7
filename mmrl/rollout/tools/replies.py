"""What tools say to calls, as segments of responses: words, or a part of what was seen, as a medium of its own.

A look becomes a medium in segments of its own:

    <tool_response>Medium 2: the part [8, 8, 40, 40] of medium 1., ENV | picture, ENV | </tool_response>, ENV
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

from mmrl.answer.text import parse_answer_value
from mmrl.answer.tool_calls import find_final_call
from mmrl.config.schema import ToolConfig as ToolOptions
from mmrl.config.schema import ToolsConfig
from mmrl.media.checks import MediaRangeError
from mmrl.policy.processor import QwenProcessor
from mmrl.rollout.tools.media_results import MediaResult, find_media
from mmrl.rollout.tools.workers import ToolFunction, ToolRequest, ToolResult, ToolWorkers
from mmrl.types import Action, AnswerType, Author, Rollout, Segment

ToolLoader = Callable[[ToolOptions], ToolFunction]
CALL_METRICS: Final = ("calls", "answers", "refused", "invalid", "errors", "timeouts", "shown")
FAILURE_KINDS: Final = ("errors", "timeouts")


class ToolRunner:
    """Where tools are called: processes that stay from step to step, until the workshop is closed.

    `find_tool` makes a tool of its line in YAML, in whichever process it is called.
    """

    def __init__(self, load_tool: ToolLoader) -> None:
        self.load_tool = load_tool
        self._workers: list[ToolWorkers] = []

    def make_executor(self, options: ToolsConfig, processor: QwenProcessor) -> ToolExecutor:
        """What the tools of a step say, with processes of its own."""
        loads = {tool.call_name: partial(self.load_tool, tool) for tool in options.tools}
        workers = ToolWorkers([*loads.values()], options.workers, options.timeout_s)
        self._workers.append(workers)
        return ToolExecutor(options=options, tool_loaders=loads, workers=workers, processor=processor)

    def close(self) -> None:
        """End all processes."""
        for workers in self._workers:
            workers.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolExecutor:
    """The tools of a step; `loads` makes them, by name, in the process that calls them."""

    options: ToolsConfig
    tool_loaders: Mapping[str, Callable[[], ToolFunction]]
    workers: ToolWorkers
    processor: QwenProcessor

    def execute_calls(self, rollouts: Sequence[Rollout]) -> list[ToolMessage]:
        """What the tools say to the calls that end these rollouts, in order.

        Raises:
            UserError: a file that is to be shown is not what it was.
        """
        wishes = [self._parse_call(rollout) for rollout in rollouts]
        jobs = [
            ToolRequest(self.tool_loaders[wish.name], wish.arguments, rollout.prompt.sample)
            for wish, rollout in zip(wishes, rollouts, strict=True)
            if isinstance(wish, Action)
        ]
        results = iter(self.workers.run(jobs))
        said = [next(results) if isinstance(wish, Action) else ToolResult(wish, "invalid") for wish in wishes]
        return [self._to_message(*pair) for pair in zip(rollouts, said, strict=True)]

    def append_message(self, rollout: Rollout, message: ToolMessage) -> Rollout:
        """A rollout with a reply, as tokens that the model never learns; none of them can pass for the chat's marks."""
        options, text = self.options, message.text
        if len(text) > options.max_result_chars:
            text = f"{text[: options.max_result_chars]}... ({len(text) - options.max_result_chars} more characters)"
        segments: list[Segment] = []
        lead = self._tokenize(options.result_prefix, allow_special_tokens=True)
        for what, view in message.media_segments:
            segments += [_environment_segment((*lead, *self._tokenize(what))), view]
            lead = ()
        segments.append(
            _environment_segment(
                (*lead, *self._tokenize(text), *self._tokenize(options.result_suffix, allow_special_tokens=True))
            )
        )
        return replace(rollout, segments=(*rollout.segments, *segments))

    def _parse_call(self, rollout: Rollout) -> Action | str:
        """The call that ends a rollout, or what is wrong with it."""
        try:
            wish: Action = parse_answer_value(AnswerType.TOOL_CALL, find_final_call(rollout.text) or "")
        except ValueError as error:
            return f'This is no call: {error}. Write {{"name": "...", "arguments": {{...}}}}.'
        if wish.name not in self.tool_loaders:
            return f"There is no tool {wish.name!r:.80}; there is {', '.join(self.tool_loaders)}."
        return wish

    def _to_message(self, rollout: Rollout, result: ToolResult) -> ToolMessage:
        if result.media is None:
            return ToolMessage(result.kind, text=result.text)
        try:
            return ToolMessage(result.kind, media_segments=self._encode_media(rollout, result.media))
        except ValueError as error:
            return ToolMessage("refused", text=f"The tool refuses: {error}")

    def _encode_media(self, rollout: Rollout, media_result: MediaResult) -> tuple[tuple[str, Segment], ...]:
        """The media that a look is at, each behind what it is.

        Raises:
            ValueError: there are none, or they are too many or too large, in words for the model.
            UserError: a file is not what it was.
        """
        media = list(find_media(media_result, rollout))
        left = self.options.max_media - len(rollout.observations)
        if len(media) > left:
            raise ValueError(f"{left} more pictures or videos may be shown, not {len(media)}")
        shown: list[tuple[str, Segment]] = []
        for number, (what, ref) in enumerate(media, start=len(rollout.media) + 1):
            try:
                shown.append((f"Medium {number}: {what}.\n", self.processor.build_tool_segment(ref)))
            except MediaRangeError as error:
                raise ValueError(str(error).removeprefix(f"{ref.path}: ")) from error
        room, needed = (
            self.options.max_total_tokens - rollout.num_tokens,
            sum(len(segment.token_ids) for _, segment in shown),
        )
        if needed > room:
            raise ValueError(f"it takes {needed} tokens to show, and {max(0, room)} are left")
        return tuple(shown)

    def _tokenize(self, text: str, *, allow_special_tokens: bool = False) -> tuple[int, ...]:
        """With `marks`, those of the chat template are among the tokens."""
        return self.processor.tokenize(text, parse_special=allow_special_tokens)


class ToolMessage(NamedTuple):
    """What a tool says or shows, and what metrics call it."""

    kind: str
    text: str = ""
    media_segments: tuple[tuple[str, Segment], ...] = ()


def count_calls(messages: Sequence[ToolMessage]) -> Counter[str]:
    """How many calls were answered how, by the names of metrics."""
    counts = Counter(reply.kind for reply in messages)
    counts["calls"] = len(messages)
    counts["shown"] = sum(len(reply.media_segments) for reply in messages)
    return counts


def _environment_segment(ids: tuple[int, ...]) -> Segment:
    return Segment(token_ids=ids, logprobs=(0.0,) * len(ids), author=Author.ENVIRONMENT)
