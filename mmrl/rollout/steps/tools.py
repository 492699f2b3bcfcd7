"""Tools: a response that ends in a call goes on behind what the tool said, turn by turn.

    .. <tool_call>{"name": "search", "arguments": {..}}</tool_call> | <tool_response>..</tool_response>, ENV | ..

A tool is a function in a file, `(call, sample, *, options) -> str`: `call` holds the arguments the model wrote. It
raises ValueError for a call it cannot answer, and the model is told why. In place of words it may return a look at a
part of what the response has seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmrl.answer.tool_calls import find_final_call
from mmrl.ports import Sampler
from mmrl.rollout.pipeline import with_metrics
from mmrl.rollout.tools.replies import CALL_METRICS, FAILURE_KINDS, ToolExecutor, count_calls
from mmrl.types import Author, FinishReason, Rollout, RolloutBatch, SamplingParams, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStep:
    """The step."""

    executor: ToolExecutor
    sampler: Sampler
    sampling_params: SamplingParams

    def __call__(self, batch: RolloutBatch, *, step: int) -> RolloutBatch:
        """The answers, every call in them answered as far as the limits go."""
        options = self.executor.options
        rollouts = {(g, i): r for g, group in enumerate(batch.groups) for i, r in enumerate(group)}
        counts: Counter[str] = Counter()
        for _ in range(options.max_turns):
            calling = {
                place: rollout
                for place, rollout in rollouts.items()
                if _ends_in_call(rollout) and rollout.num_tokens <= options.max_total_tokens
            }
            if not calling:
                break
            said = self._append_tool_messages(list(calling.values()), counts)
            longer = self.sampler.extend(said, self.sampling_params, step=step)
            rollouts |= zip(calling, longer, strict=True)
        counts["unanswered"] = sum(_ends_in_call(rollout) for rollout in rollouts.values())
        groups = tuple(tuple(rollouts[g, i] for i in range(len(group))) for g, group in enumerate(batch.groups))
        named = {f"{options.name}/{what}": float(counts[what]) for what in (*CALL_METRICS, "unanswered")}
        return with_metrics(replace(batch, groups=groups), named)

    def _append_tool_messages(self, rollouts: Sequence[Rollout], counts: Counter[str]) -> list[Rollout]:
        """The rollouts with what the tools said of their calls."""
        options = self.executor.options
        replies = self.executor.execute_calls(rollouts)
        failed = [reply for reply in replies if reply.kind in FAILURE_KINDS]
        if failed and options.on_error == "stop":
            raise UserError(f"step {options.name}: a tool failed: {failed[0].text}")
        counts.update(count_calls(replies))
        return [self.executor.append_message(*pair) for pair in zip(rollouts, replies, strict=True)]


def _ends_in_call(rollout: Rollout) -> bool:
    """Whether a response ends in a call."""
    last = rollout.segments[-1]
    called = rollout.finish_reason is FinishReason.STOP and last.author is Author.POLICY
    return called and find_final_call(rollout.text) is not None
