"""Tools: a response that ends in a call goes on behind what the tool said, turn by turn.

    .. <tool_call>{"name": "search", "arguments": {..}}</tool_call> | <tool_response>..</tool_response>, ENV | ..

A tool is a function in a file, `(call, sample, *, options) -> str`: `call` holds the arguments the model wrote. It
raises ValueError for a call it cannot answer, and the model is told why. In place of words it may return a look at a
part of what the response has seen; that becomes a medium of its own, in segments of its own:

    .. <tool_response>Medium 2: the part [8, 8, 40, 40] of medium 1., ENV | picture, ENV | </tool_response>, ENV | ..
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mmrl.answer.text import read
from mmrl.config.schema import UseTools
from mmrl.media.checks import NoSuchPart
from mmrl.policy.processor import QwenProcessor
from mmrl.ports import Sampler
from mmrl.rollout.looks import Look, found
from mmrl.rollout.program import told
from mmrl.rollout.tool_calls import Job, Said, Tool, Workers
from mmrl.types import Action, Answers, Author, Finish, Kind, Rollout, SamplingLaw, Segment, UserError

CLOSING = "</tool_call>"
_OPENING = "<tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """The step. `loads` makes the tools, by name, in the process that calls them."""

    options: UseTools
    loads: Mapping[str, Callable[[], Tool]]
    sampler: Sampler
    processor: QwenProcessor
    law: SamplingLaw

    def __call__(self, answers: Answers, *, step: int) -> Answers:
        """The answers, every call in them answered as far as the limits go."""
        rollouts = {(g, i): r for g, group in enumerate(answers.groups) for i, r in enumerate(group)}
        counts: Counter[str] = Counter()
        with Workers([*self.loads.values()], self.options.workers, self.options.deadline_s).open() as workers:
            for _ in range(self.options.turns):
                calling = {place: rollout for place, rollout in rollouts.items() if self._calls(rollout)}
                if not calling:
                    break
                said = self._answered(list(calling.values()), workers, counts)
                longer = self.sampler.extend(said, self.law, step=step)
                rollouts |= zip(calling, longer, strict=True)
        counts["unanswered"] = sum(_calls_last(rollout) for rollout in rollouts.values())
        groups = tuple(tuple(rollouts[g, i] for i in range(len(group))) for g, group in enumerate(answers.groups))
        named = {f"{self.options.name}/{what}": float(counts[what]) for what in _COUNTED}
        return told(replace(answers, groups=groups), named)

    def _calls(self, rollout: Rollout) -> bool:
        return _calls_last(rollout) and rollout.num_tokens <= self.options.max_tokens

    def _answered(self, rollouts: Sequence[Rollout], workers: Workers, counts: Counter[str]) -> list[Rollout]:
        """The rollouts with what the tools said of their calls."""
        wishes = [self._wish(rollout) for rollout in rollouts]
        jobs = [
            Job(self.loads[wish.name], wish.arguments, rollout.prompt.sample)
            for wish, rollout in zip(wishes, rollouts, strict=True)
            if isinstance(wish, Action)
        ]
        results = iter(workers.run(jobs))
        said = [next(results) if isinstance(wish, Action) else Said(wish, "invalid") for wish in wishes]
        failed = [result for result in said if result.kind in ("errors", "timeouts")]
        if failed and self.options.on_error == "stop":
            raise UserError(f"step {self.options.name}: a tool failed: {failed[0].text}")
        replies = [self._reply(*pair) for pair in zip(rollouts, said, strict=True)]
        counts.update(reply.kind for reply in replies)
        counts["calls"] += len(replies)
        counts["shown"] += sum(len(reply.shown) for reply in replies)
        return [self._longer(*pair) for pair in zip(rollouts, replies, strict=True)]

    def _wish(self, rollout: Rollout) -> Action | str:
        """The call that ends a rollout, or what is wrong with it."""
        try:
            wish: Action = read(Kind.TOOL_CALL, rollout.text[rollout.text.rindex(_OPENING) :].strip())
        except ValueError as error:
            return f'This is no call: {error}. Write {{"name": "...", "arguments": {{...}}}}.'
        if wish.name not in self.loads:
            return f"There is no tool {wish.name!r:.80}; there is {', '.join(self.loads)}."
        return wish

    def _reply(self, rollout: Rollout, said: Said) -> _Reply:
        if said.look is None:
            return _Reply(said.kind, text=said.text)
        try:
            return _Reply(said.kind, shown=self._shown(rollout, said.look))
        except ValueError as error:
            return _Reply("refused", text=f"The tool refuses: {error}")

    def _shown(self, rollout: Rollout, look: Look) -> tuple[tuple[str, Segment], ...]:
        """The media that a look is at, each behind what it is.

        Raises:
            ValueError: there are none, or they are too many or too large, in words for the model.
            UserError: a file is not what it was.
        """
        media = list(found(look, rollout))
        left = self.options.max_views - len(rollout.views)
        if len(media) > left:
            raise ValueError(f"{left} more pictures or videos may be shown, not {len(media)}")
        shown: list[tuple[str, Segment]] = []
        for number, (what, ref) in enumerate(media, start=len(rollout.media) + 1):
            try:
                shown.append((f"Medium {number}: {what}.\n", self.processor.show(ref)))
            except NoSuchPart as error:
                raise ValueError(str(error).removeprefix(f"{ref.path}: ")) from error
        room, needed = self.options.max_tokens - rollout.num_tokens, sum(len(segment.ids) for _, segment in shown)
        if needed > room:
            raise ValueError(f"it takes {needed} tokens to show, and {max(0, room)} are left")
        return tuple(shown)

    def _longer(self, rollout: Rollout, reply: _Reply) -> Rollout:
        """What a tool said, as tokens that the model never learns; none of them can pass for the chat's own marks."""
        options, text = self.options, reply.text
        if len(text) > options.max_chars:
            text = f"{text[: options.max_chars]}... ({len(text) - options.max_chars} more characters)"
        segments: list[Segment] = []
        lead = self._tokens(options.before, marks=True)
        for what, view in reply.shown:
            segments += [_by_env((*lead, *self._tokens(what))), view]
            lead = ()
        segments.append(_by_env((*lead, *self._tokens(text), *self._tokens(options.after, marks=True))))
        return replace(rollout, segments=(*rollout.segments, *segments))

    def _tokens(self, text: str, *, marks: bool = False) -> tuple[int, ...]:
        """With `marks`, those of the chat template are among the tokens."""
        return self.processor.tokens(text, marks=marks)


class _Reply(NamedTuple):
    """What a tool says or shows, and what metrics call it."""

    kind: str
    text: str = ""
    shown: tuple[tuple[str, Segment], ...] = ()


def _by_env(ids: tuple[int, ...]) -> Segment:
    return Segment(ids=ids, logps=(0.0,) * len(ids), author=Author.ENV)


_COUNTED = ("calls", "answers", "refused", "invalid", "errors", "timeouts", "shown", "unanswered")


def _calls_last(rollout: Rollout) -> bool:
    """Whether a response ends in a call."""
    last = rollout.segments[-1]
    return rollout.finish is Finish.STOP and last.author is Author.POLICY and _ends_in_call(rollout.text)


def _ends_in_call(text: str) -> bool:
    opening = text.rfind(_OPENING)
    return opening >= 0 and text[opening:].rstrip().endswith(CLOSING)
