"""A response as samplers make it: it begins without a token, and grows by a segment at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
    segment = Segment(
        ids=tuple(drawn.ids),
        logps=tuple(drawn.logps),
        author=Author.POLICY,
        version=version,
        law=None if law == rollout.law else law,
    )
    return processor.read(replace(rollout, segments=(*rollout.segments, segment), finish=drawn.finish))
