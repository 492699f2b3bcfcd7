"""Demonstrations that call tools: behind each call stands the tool's result, as in a rollout that makes the call.

    .. <tool_call>..</tool_call>, DEMONSTRATION | <tool_response>..</tool_response>, ENVIRONMENT | .., DEMONSTRATION

A demonstration in a dataset holds the text that the model is to write and nothing else. Its calls are executed here, by
the tools themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mmrl.answer.tool_calls import find_final_call
from mmrl.rollout.tools.executor import CALL_METRICS, FAILURE_KINDS, ToolExecutor, ToolMessage, count_calls
from mmrl.types import Rollout, Segment, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationTools:
    """Executes the calls of demonstrations."""

    executor: ToolExecutor

    def complete(self, demonstrations: Sequence[Rollout]) -> tuple[list[Rollout], Mapping[str, float]]:
        """Return demonstrations with a result behind each call that something follows, and counts of the calls.

        A demonstration without such a call is returned as it is.

        Raises:
            UserError: a tool failed, or a demonstration exceeds the limits of turns or tokens.
        """
        counts: Counter[str] = Counter()
        turns_of = list(map(self._split_at_calls, demonstrations))
        completed = []
        for demonstration, turns in zip(demonstrations, turns_of, strict=True):
            completed.append(self._append_segments(replace(demonstration, segments=()), turns[0]))
        # Turn by turn over all demonstrations, so that one hung tool delays the others once and not once each.
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
                # As it came, since nothing was executed: decoding its tokens anew could change its text.
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
                    f"sample {rollout.prompt.sample.id}: call {turn} of its response, behind {rollout.num_tokens} "
                    f"tokens, is beyond {exceeded} of step {options.name}; raise that, or leave the sample out"
                )
        messages = self.executor.execute_calls(rollouts)
        for rollout, message in zip(rollouts, messages, strict=True):
            if message.kind in FAILURE_KINDS:
                raise UserError(f"sample {rollout.prompt.sample.id}: call {turn} of its response: {message.text}")
        return messages

    def _split_at_calls(self, demonstration: Rollout) -> list[list[Segment]]:
        """Split the segments of a demonstration into turns. Each turn but the last ends in a call."""
        turns: list[list[Segment]] = [[]]
        for segment in demonstration.segments:
            if find_final_call(self._decode(turns[-1])) is not None:
                turns.append([])
            turns[-1].append(segment)
        return turns

    def _append_segments(self, rollout: Rollout, segments: Sequence[Segment]) -> Rollout:
        # The text becomes that of this turn alone: the executor looks for the call at its end.
        return replace(rollout, segments=(*rollout.segments, *segments), text=self._decode(segments))

    def _decode(self, segments: Sequence[Segment]) -> str:
        return self.executor.processor.decode([token for segment in segments for token in segment.token_ids])
