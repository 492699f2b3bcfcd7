"""Executes tool calls and writes their results into responses.

A text result is one segment. An image or video has its own segment, after words that say what it is:

    <tool_response>Medium 2: the part [8, 8, 40, 40] of medium 1. | image | </tool_response>

All of these segments have the author ENVIRONMENT, so none of their tokens is trained. The image is an observation
(`MediaObservation`): pixels that the model sees in the middle of its response.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

from mmrl.answer.text import parse_answer_value
from mmrl.answer.tool_calls import find_final_call
from mmrl.config.schema import ToolsConfig
from mmrl.policy.processor import PromptProcessor
from mmrl.rollout.tools.media_results import find_media
from mmrl.rollout.tools.workers import ToolRequest, ToolResult, ToolWorkers
from mmrl.types import Action, AnswerType, Author, MediaRangeError, MediaRef, MediaResult, Rollout, Segment, UserError

# Counts of calls: all; then by outcome; then images and videos shown.
CALL_METRICS: Final = ("calls", "results", "refused", "invalid", "errors", "timeouts", "limits", "media_shown")
TOOL_FAILURE_KINDS: Final = ("errors", "timeouts", "limits")  # outcomes that are the tool's own fault, not the call's


@dataclass(slots=True)
class ToolRunner:
    """Owns the processes that run tools and environments. They stay from step to step, until `close`."""

    base_dir: Path  # folder that relative files of tools and environments start from
    pictures_dir: Path = Path()  # folder for pictures that environments draw
    close_workers: list[Callable[[], None]] = field(default_factory=list)  # each ends the processes of one step

    def make_executor(self, options: ToolsConfig, processor: PromptProcessor) -> ToolExecutor:
        """Return the executor of a step's tools. Its processes start with the first call."""
        workers = ToolWorkers(self.base_dir, options)
        self.close_workers.append(workers.close)
        return ToolExecutor(options=options, workers=workers, processor=processor)

    def close(self) -> None:
        """End all processes. A later call starts new ones."""
        for close in self.close_workers:
            close()


class ToolMessage(NamedTuple):
    """The reply to one call, as it is written into the response."""

    kind: str  # outcome, one of `CALL_METRICS`
    text: str = ""  # text of the reply; empty where media are shown
    media_segments: tuple[tuple[str, Segment], ...] = ()  # images and videos, each with the words that precede it


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolExecutor:
    """Executes the calls of one step's tools."""

    options: ToolsConfig
    workers: ToolWorkers
    processor: PromptProcessor

    def execute_calls(self, rollouts: Sequence[Rollout]) -> list[ToolMessage]:
        """Execute the calls that end these rollouts, and return one message for each, in order.

        A call that is malformed, or that no tool can answer, gets a message that says why.

        Raises:
            UserError: a file that is to be shown has changed since the run started.
        """
        calls = list(map(self._parse_call, rollouts))
        requests: dict[int, ToolRequest] = {}  # by index of the rollout
        for index, call in enumerate(calls):
            if isinstance(call, Action):
                requests[index] = ToolRequest(call, rollouts[index].prompt.sample)
        # All calls are sent before any result is awaited, so one that hangs costs the batch its deadline once.
        results = dict(zip(requests, self.workers.run(list(requests.values())), strict=True))
        messages = []
        for index, (call, rollout) in enumerate(zip(calls, rollouts, strict=True)):
            result = results[index] if isinstance(call, Action) else ToolResult(call, "invalid")
            if result.media is None:
                messages.append(ToolMessage(result.kind, text=result.text))
                continue
            try:
                messages.append(ToolMessage(result.kind, media_segments=self._encode_media(rollout, result.media)))
            except (ValueError, OverflowError) as error:
                # A number of the box may be too large for a float, or infinite.
                messages.append(ToolMessage("refused", text=f"The tool refuses: {error}"))
        return messages

    def append_message(self, rollout: Rollout, message: ToolMessage) -> Rollout:
        """Append a reply to a rollout, between `result_prefix` and `result_suffix`.

        Only prefix and suffix may contain special tokens: text of a tool cannot end the turn or open another one.
        """
        tokenize, options = self.processor.tokenize, self.options
        prefix = tokenize(options.result_prefix, parse_special=True)
        media = [(tokenize(label), segment) for label, segment in message.media_segments]
        text = tokenize(cut_text(message.text, options.max_result_chars))
        return append_reply(rollout, prefix, media, text + tokenize(options.result_suffix, parse_special=True))

    def _parse_call(self, rollout: Rollout) -> Action | str:
        """Return the call that ends a rollout, or words for the model about what is wrong with it."""
        try:
            call: Action = parse_answer_value(AnswerType.TOOL_CALL, find_final_call(rollout.text) or "")
        except ValueError as error:
            return f'This is not a call: {error}. Write {{"name": "...", "arguments": {{...}}}}.'
        known = [tool.call_name for tool in self.options.tools]
        if call.name not in known:
            return f"There is no tool {call.name!r:.80}; there is {', '.join(known)}."
        return call

    def _encode_media(self, rollout: Rollout, media_result: MediaResult) -> tuple[tuple[str, Segment], ...]:
        """Encode the images and videos of a result, each with the words that precede it.

        Raises:
            ValueError: there are none, they are too many or too large; in words for the model.
            UserError: a file has changed since the run started.
        """
        media = list(find_media(media_result, rollout))
        # `observations` are the images and videos that earlier calls of this response showed.
        num_allowed = self.options.max_media - len(rollout.observations)
        if len(media) > num_allowed:
            raise ValueError(f"{num_allowed} more pictures or videos may be shown, not {len(media)}")
        encoded: list[tuple[str, Segment]] = []
        num_tokens = 0
        for number, (label, ref) in enumerate(media, start=len(rollout.media) + 1):
            segment = encode_part(self.processor, ref)
            encoded.append((f"Medium {number}: {label}.\n", segment))
            num_tokens += len(segment.token_ids)
        num_free = self.options.max_total_tokens - rollout.num_tokens
        if num_tokens > num_free:
            raise ValueError(f"it takes {num_tokens} tokens to show, and {max(0, num_free)} are left")
        return tuple(encoded)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationTools:
    """Executes the calls of demonstrations, and puts the tool's result after each, as in a rollout.

        .. <tool_call>..</tool_call>, DEMONSTRATION | <tool_response>..</tool_response>, ENVIRONMENT | .., DEMONSTRATION

    A demonstration in a dataset holds only the text that the model should write, without results.
    """

    executor: ToolExecutor

    def complete(self, demonstrations: Sequence[Rollout]) -> tuple[list[Rollout], Mapping[str, float]]:
        """Return the demonstrations with a result after each call but a final one, and counts of the calls.

        A demonstration without such a call is returned as it is.

        Raises:
            UserError: a tool failed, or a demonstration exceeds the limits of turns or tokens.
        """
        counts: Counter[str] = Counter()
        turns_of = list(map(self._split_at_calls, demonstrations))
        completed = []
        for demonstration, turns in zip(demonstrations, turns_of, strict=True):
            completed.append(self._append_segments(replace(demonstration, segments=()), turns[0]))
        # One turn of all demonstrations at a time: a hung tool then delays them once, not once per demonstration.
        for turn in range(1, max(map(len, turns_of), default=0)):
            calling = [index for index, turns in enumerate(turns_of) if turn < len(turns)]
            messages = self._execute_turn([completed[index] for index in calling], turn)
            counts.update(count_calls(messages))
            for index, message in zip(calling, messages, strict=True):
                answered = self.executor.append_message(completed[index], message)
                completed[index] = self._append_segments(answered, turns_of[index][turn])
        for index, turns in enumerate(turns_of):
            if len(turns) > 1:
                completed[index] = self.executor.processor.parse_rollout(completed[index])
            else:
                # As it came, since nothing was executed: decoding its tokens again could change its text.
                completed[index] = demonstrations[index]
        return completed, {f"{self.executor.options.name}/{name}": float(counts[name]) for name in CALL_METRICS}

    def _execute_turn(self, rollouts: Sequence[Rollout], turn: int) -> list[ToolMessage]:
        """Execute the last call of each rollout, which is its call number `turn`, counted from 1."""
        options = self.executor.options
        for rollout in rollouts:
            exceeded = None
            if turn > options.max_turns:
                exceeded = f"max_turns={options.max_turns}"
            elif rollout.num_tokens > options.max_total_tokens:
                exceeded = f"max_total_tokens={options.max_total_tokens}"
            if exceeded is not None:
                raise UserError(
                    f"sample {rollout.prompt.sample.id}: call {turn} of its response, after {rollout.num_tokens} "
                    f"tokens, is beyond {exceeded} of step {options.name}; raise that, or leave the sample out"
                )
        messages = self.executor.execute_calls(rollouts)
        for rollout, message in zip(rollouts, messages, strict=True):
            if message.kind in TOOL_FAILURE_KINDS:
                raise UserError(f"sample {rollout.prompt.sample.id}: call {turn} of its response: {message.text}")
        return messages

    def _split_at_calls(self, demonstration: Rollout) -> list[list[Segment]]:
        """Split the segments of a demonstration into turns. Each turn but the last ends in a call."""
        turns: list[list[Segment]] = [[]]
        for segment in demonstration.segments:
            if find_final_call(self.executor.processor.decode_segments(turns[-1])) is not None:
                turns.append([])
            turns[-1].append(segment)
        return turns

    def _append_segments(self, rollout: Rollout, segments: Sequence[Segment]) -> Rollout:
        # `text` holds only this turn, because the executor looks for the call at its end.
        text = self.executor.processor.decode_segments(segments)
        return replace(rollout, segments=(*rollout.segments, *segments), text=text)


def count_calls(messages: Sequence[ToolMessage]) -> Counter[str]:
    """Count calls by outcome, calls in all, and media shown, under the names of `CALL_METRICS`."""
    counts = Counter(message.kind for message in messages)
    counts["calls"] = len(messages)
    counts["media_shown"] = sum(len(message.media_segments) for message in messages)
    return counts


def cut_text(text: str, limit: int) -> str:
    """Return a text with at most `limit` characters and a note of how many were cut, or the text as it is."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit} more characters)"


def encode_part(processor: PromptProcessor, ref: MediaRef) -> Segment:
    """Return the segment that shows `ref`. Raises ValueError, in words for the model, if the file has no such part."""
    try:
        return processor.build_tool_segment(ref)
    except MediaRangeError as error:
        # The message begins with the file's path, which the model must not see.
        raise ValueError(str(error).removeprefix(f"{ref.path}: ")) from error


def append_reply(
    rollout: Rollout, prefix: tuple[int, ...], media: Iterable[tuple[tuple[int, ...], Segment]], ending: tuple[int, ...]
) -> Rollout:
    """Append what a tool or an environment replied: tokens, images and videos, each after tokens that name it, tokens.

    Tokens that follow each other are one segment, so a reply without media is one segment.
    """
    segments: list[Segment] = []
    pending = prefix
    for label, segment in media:
        pending += label
        if pending:
            segments.append(_environment_segment(pending))
        segments.append(segment)
        pending = ()
    return replace(rollout, segments=(*rollout.segments, *segments, _environment_segment(pending + ending)))


def _environment_segment(token_ids: tuple[int, ...]) -> Segment:
    return Segment(token_ids=token_ids, logprobs=(0.0,) * len(token_ids), author=Author.ENVIRONMENT)
