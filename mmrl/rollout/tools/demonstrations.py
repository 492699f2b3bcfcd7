"""Demonstrations that call tools: behind each call stands what the tool says, as it will when the policy makes it.

    .. <tool_call>..</tool_call>, TEACHER | <tool_response>..</tool_response>, ENV | <answer>7</answer>, TEACHER

A demonstration holds what the model is to write and nothing else; its calls are answered by the tools themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mmrl.answer.tool_calls import find_final_call
from mmrl.rollout.tools.replies import CALL_METRICS, FAILURE_KINDS, ToolExecutor, ToolMessage, count_calls
from mmrl.types import Rollout, Segment, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationTools:
    """Answers the calls of demonstrations."""

    executor: ToolExecutor

    def complete(self, demonstrations: Sequence[Rollout]) -> tuple[list[Rollout], Mapping[str, float]]:
        """Demonstrations with what tools say to their calls, in order; and how many were answered how.

        Raises:
            UserError: a tool failed, or a response could not hold what a demonstration does.
        """
        counts: Counter[str] = Counter()
        legs = [self._split_at_calls(rollout) for rollout in demonstrations]
        told = [
            self._append_segments(replace(d, segments=()), own[0]) for d, own in zip(demonstrations, legs, strict=True)
        ]
        for turn in range(1, max(map(len, legs), default=0)):
            calling = [place for place, own in enumerate(legs) if turn < len(own)]
            replies = self._execute_turn([told[place] for place in calling], turn)
            counts.update(count_calls(replies))
            for place, reply in zip(calling, replies, strict=True):
                told[place] = self._append_segments(self.executor.append_message(told[place], reply), legs[place][turn])
        whole = [
            self.executor.processor.parse_rollout(rollout) if len(own) > 1 else demonstration
            for demonstration, rollout, own in zip(demonstrations, told, legs, strict=True)
        ]
        return whole, {f"{self.executor.options.name}/{what}": float(counts[what]) for what in CALL_METRICS}

    def _execute_turn(self, rollouts: Sequence[Rollout], turn: int) -> list[ToolMessage]:
        """What the tools say to the last calls of demonstrations, the `turn`th of each."""
        options = self.executor.options
        for rollout in rollouts:
            if turn > options.max_turns or rollout.num_tokens > options.max_total_tokens:
                limit = (
                    f"turns={options.max_turns}"
                    if turn > options.max_turns
                    else f"max_tokens={options.max_total_tokens}"
                )
                raise UserError(
                    f"sample {rollout.prompt.sample.id}: call {turn} of its response, behind {rollout.num_tokens} "
                    f"tokens, is beyond {limit} of step {options.name}; raise that, or leave the sample out"
                )
        replies = self.executor.execute_calls(rollouts)
        for rollout, reply in zip(rollouts, replies, strict=True):
            if reply.kind in FAILURE_KINDS:
                raise UserError(f"sample {rollout.prompt.sample.id}: call {turn} of its response: {reply.text}")
        return replies

    def _split_at_calls(self, rollout: Rollout) -> list[list[Segment]]:
        """The segments of a demonstration in parts, of which each but the last ends in a call."""
        legs: list[list[Segment]] = [[]]
        for segment in rollout.segments:
            if find_final_call(self._decode(legs[-1])) is not None:
                legs.append([])
            legs[-1].append(segment)
        return legs

    def _append_segments(self, rollout: Rollout, segments: Sequence[Segment]) -> Rollout:
        return replace(rollout, segments=(*rollout.segments, *segments), text=self._decode(segments))

    def _decode(self, segments: Sequence[Segment]) -> str:
        return self.executor.processor.decode([token for segment in segments for token in segment.token_ids])
