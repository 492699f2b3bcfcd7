"""A response as samplers make it: it begins without a token, and grows by a segment at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from mmrl.policy.processor import QwenProcessor
from mmrl.types import Answer, Author, Finish, Prompt, Rollout, SamplingLaw, Segment


class Drawn(NamedTuple):
    """What was drawn behind a response, once."""

    ids: Sequence[int]
    logps: Sequence[float]
    finish: Finish


def begun(prompt: Prompt, index: int, law: SamplingLaw) -> Rollout:
    """A response that has no token yet."""
    nothing = Answer(text=None, thought=None, value=None)
    return Rollout(prompt=prompt, index=index, segments=(), text="", answer=nothing, finish=Finish.LENGTH, law=law)


def longer(rollout: Rollout, drawn: Drawn, law: SamplingLaw, *, version: int, processor: QwenProcessor) -> Rollout:
    """The response with one more segment of POLICY, which the policy of `version` drew from `law`."""
    drawn = _stopped(rollout, drawn, law, processor)
    segment = Segment(
        ids=tuple(drawn.ids),
        logps=tuple(drawn.logps),
        author=Author.POLICY,
        version=version,
        law=None if law == rollout.law else law,
    )
    return processor.read(replace(rollout, segments=(*rollout.segments, segment), finish=drawn.finish))


class Stops:
    """Tells whether the token drawn last completes a string that ends responses."""

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._strings, self._decode = strings, decode
        self.window = max((len(string.encode()) for string in strings), default=0)  # no token is less than a byte
        self._lasts = {string[-1] for string in strings}
        self._may: dict[int, bool] = {}

    def complete(self, ids: Sequence[int]) -> bool:
        """Whether one ends within the last of `ids`; none did before."""
        if not self._strings:
            return False
        last = ids[-1]
        if last not in self._may:  # most tokens lack the last character, and need no look at what came before
            text = self._decode([last])
            self._may[last] = any(char in text or not char.isascii() for char in self._lasts)
        return self._may[last] and any(string in self._decode(ids[-self.window :]) for string in self._strings)


def _stopped(rollout: Rollout, drawn: Drawn, law: SamplingLaw, processor: QwenProcessor) -> Drawn:
    """What was drawn, up to the token that completes a stop string begun before: engines look at new tokens alone."""
    if not (law.stop and rollout.segments) or rollout.finish is not Finish.LENGTH:
        return drawn
    own = takewhile(lambda segment: segment.author is Author.POLICY, reversed(rollout.segments))
    stops = Stops(law.stop, processor.decode)
    before = [token for segment in [*own][::-1] for token in segment.ids][-stops.window :]
    for count in range(1, min(stops.window, len(drawn.ids) + 1) if before else 0):
        if stops.complete([*before, *drawn.ids[:count]]):
            return Drawn(drawn.ids[:count], drawn.logps[:count], Finish.STOP)
    return drawn
