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

from mmrl.answer.tool_calls import last_call
from mmrl.ports import Sampler
from mmrl.rollout.pipeline import told
from mmrl.rollout.tools.replies import COUNTED, FAILURES, Replies, count
from mmrl.types import Answers, Author, Finish, Rollout, SamplingLaw, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """The step."""

    replies: Replies
    sampler: Sampler
    law: SamplingLaw

    def __call__(self, answers: Answers, *, step: int) -> Answers:
        """The answers, every call in them answered as far as the limits go."""
        options = self.replies.options
        rollouts = {(g, i): r for g, group in enumerate(answers.groups) for i, r in enumerate(group)}
        counts: Counter[str] = Counter()
        for _ in range(options.turns):
            calling = {
                place: rollout
                for place, rollout in rollouts.items()
                if _calls_last(rollout) and rollout.num_tokens <= options.max_tokens
            }
            if not calling:
                break
            said = self._answered(list(calling.values()), counts)
            longer = self.sampler.extend(said, self.law, step=step)
            rollouts |= zip(calling, longer, strict=True)
        counts["unanswered"] = sum(_calls_last(rollout) for rollout in rollouts.values())
        groups = tuple(tuple(rollouts[g, i] for i in range(len(group))) for g, group in enumerate(answers.groups))
        named = {f"{options.name}/{what}": float(counts[what]) for what in (*COUNTED, "unanswered")}
        return told(replace(answers, groups=groups), named)

    def _answered(self, rollouts: Sequence[Rollout], counts: Counter[str]) -> list[Rollout]:
        """The rollouts with what the tools said of their calls."""
        options = self.replies.options
        replies = self.replies.to(rollouts)
        failed = [reply for reply in replies if reply.kind in FAILURES]
        if failed and options.on_error == "stop":
            raise UserError(f"step {options.name}: a tool failed: {failed[0].text}")
        counts.update(count(replies))
        return [self.replies.behind(*pair) for pair in zip(rollouts, replies, strict=True)]


def _calls_last(rollout: Rollout) -> bool:
    """Whether a response ends in a call."""
    last = rollout.segments[-1]
    called = rollout.finish is Finish.STOP and last.author is Author.POLICY
    return called and last_call(rollout.text) is not None
