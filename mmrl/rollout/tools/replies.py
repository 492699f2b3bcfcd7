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

from mmrl.answer.text import read
from mmrl.answer.tool_calls import last_call
from mmrl.config.schema import Tool as ToolOptions
from mmrl.config.schema import UseTools
from mmrl.media.checks import NoSuchPart
from mmrl.policy.processor import QwenProcessor
from mmrl.rollout.tools.media_results import Look, found
from mmrl.rollout.tools.workers import Job, Said, Tool, Workers
from mmrl.types import Action, Author, Kind, Rollout, Segment

FindTool = Callable[[ToolOptions], Tool]
COUNTED: Final = ("calls", "answers", "refused", "invalid", "errors", "timeouts", "shown")
FAILURES: Final = ("errors", "timeouts")


class Workshop:
    """Where tools are called: processes that stay from step to step, until the workshop is closed.

    `find_tool` makes a tool of its line in YAML, in whichever process it is called.
    """

    def __init__(self, find_tool: FindTool) -> None:
        self.find_tool = find_tool
        self._workers: list[Workers] = []

    def replies(self, options: UseTools, processor: QwenProcessor) -> Replies:
        """What the tools of a step say, with processes of its own."""
        loads = {tool.called: partial(self.find_tool, tool) for tool in options.tools}
        workers = Workers([*loads.values()], options.workers, options.deadline_s)
        self._workers.append(workers)
        return Replies(options=options, loads=loads, workers=workers, processor=processor)

    def close(self) -> None:
        """End all processes."""
        for workers in self._workers:
            workers.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """The tools of a step; `loads` makes them, by name, in the process that calls them."""

    options: UseTools
    loads: Mapping[str, Callable[[], Tool]]
    workers: Workers
    processor: QwenProcessor

    def to(self, rollouts: Sequence[Rollout]) -> list[Reply]:
        """What the tools say to the calls that end these rollouts, in order.

        Raises:
            UserError: a file that is to be shown is not what it was.
        """
        wishes = [self._wish(rollout) for rollout in rollouts]
        jobs = [
            Job(self.loads[wish.name], wish.arguments, rollout.prompt.sample)
            for wish, rollout in zip(wishes, rollouts, strict=True)
            if isinstance(wish, Action)
        ]
        results = iter(self.workers.run(jobs))
        said = [next(results) if isinstance(wish, Action) else Said(wish, "invalid") for wish in wishes]
        return [self._reply(*pair) for pair in zip(rollouts, said, strict=True)]

    def behind(self, rollout: Rollout, reply: Reply) -> Rollout:
        """A rollout with a reply, as tokens that the model never learns; none of them can pass for the chat's marks."""
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

    def _wish(self, rollout: Rollout) -> Action | str:
        """The call that ends a rollout, or what is wrong with it."""
        try:
            wish: Action = read(Kind.TOOL_CALL, last_call(rollout.text) or "")
        except ValueError as error:
            return f'This is no call: {error}. Write {{"name": "...", "arguments": {{...}}}}.'
        if wish.name not in self.loads:
            return f"There is no tool {wish.name!r:.80}; there is {', '.join(self.loads)}."
        return wish

    def _reply(self, rollout: Rollout, said: Said) -> Reply:
        if said.look is None:
            return Reply(said.kind, text=said.text)
        try:
            return Reply(said.kind, shown=self._shown(rollout, said.look))
        except ValueError as error:
            return Reply("refused", text=f"The tool refuses: {error}")

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

    def _tokens(self, text: str, *, marks: bool = False) -> tuple[int, ...]:
        """With `marks`, those of the chat template are among the tokens."""
        return self.processor.tokens(text, marks=marks)


class Reply(NamedTuple):
    """What a tool says or shows, and what metrics call it."""

    kind: str
    text: str = ""
    shown: tuple[tuple[str, Segment], ...] = ()


def count(replies: Sequence[Reply]) -> Counter[str]:
    """How many calls were answered how, by the names of metrics."""
    counts = Counter(reply.kind for reply in replies)
    counts["calls"] = len(replies)
    counts["shown"] = sum(len(reply.shown) for reply in replies)
    return counts


def _by_env(ids: tuple[int, ...]) -> Segment:
    return Segment(ids=ids, logps=(0.0,) * len(ids), author=Author.ENV)
