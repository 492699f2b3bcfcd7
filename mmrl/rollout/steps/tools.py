"""Tool calls: a response that ends in a call continues after the tool's result, turn by turn.

    .. <tool_call>{"name": "search", "arguments": {..}}</tool_call>, POLICY | <tool_response>..</tool_response>,
    ENVIRONMENT | .., POLICY

`mmrl.rollout.tools.builtin` says what a tool is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain

from mmrl.answer.tool_calls import find_final_call
from mmrl.rollout.steps.base import Place, RolloutContext, add_metrics, with_rollouts
from mmrl.rollout.tools.executor import CALL_METRICS, TOOL_FAILURE_KINDS, ToolExecutor, count_calls
from mmrl.types import Author, FinishReason, Rollout, RolloutBatch, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStep:
    """Answers the calls that end rollouts and lets the policy continue, up to `max_turns` times."""

    executor: ToolExecutor
    context: RolloutContext  # its sampling parameters have a call's closing tag as a stop string

    def __call__(self, batch: RolloutBatch, *, step: int) -> RolloutBatch:
        """Return the batch with every call answered, within the limits of turns and tokens.

        Raises:
            UserError: a tool failed, and `on_error` is `stop`.
        """
        options, groups = self.executor.options, batch.groups
        counts: Counter[str] = Counter()
        for _ in range(options.max_turns):
            # All rollouts of the batch that call a tool continue together, in one large request to the engine per turn.
            calling: dict[Place, Rollout] = {}
            for group_index, group in enumerate(groups):
                for position, rollout in enumerate(group):
                    if ends_in_call(rollout) and rollout.num_tokens <= options.max_total_tokens:
                        calling[group_index, position] = rollout
            if not calling:
                break
            messages = self.executor.execute_calls(list(calling.values()))
            for message in messages:
                if message.kind in TOOL_FAILURE_KINDS and options.on_error == "stop":
                    raise UserError(f"step {options.name}: a tool failed: {message.text}")
            counts.update(count_calls(messages))
            answered = list(map(self.executor.append_message, calling.values(), messages))
            continued = self.context.sampler.extend(answered, self.context.sampling_params, step=step)
            groups = with_rollouts(groups, dict(zip(calling, continued, strict=True)))
        # Calls beyond the limits of turns or tokens. A call that the length limit cut off is not among them.
        counts["unanswered"] = sum(map(ends_in_call, chain.from_iterable(groups)))
        metrics = {f"{options.name}/{name}": float(counts[name]) for name in (*CALL_METRICS, "unanswered")}
        return add_metrics(replace(batch, groups=groups), metrics)


def ends_in_call(rollout: Rollout) -> bool:
    """Return True if the policy ended the response with a tool call."""
    stopped = rollout.finish_reason is FinishReason.STOP and rollout.segments[-1].author is Author.POLICY
    return stopped and find_final_call(rollout.text) is not None
