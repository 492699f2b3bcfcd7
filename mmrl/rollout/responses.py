"""A response as samplers make it: it begins without a token, and grows by a segment at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from mmrl.policy.processor import QwenProcessor
from mmrl.types import Answer, Author, FinishReason, Prompt, Rollout, SamplingParams, Segment


class GeneratedTokens(NamedTuple):
    """What was drawn behind a response, once."""

    ids: Sequence[int]
    logps: Sequence[float]
    finish: FinishReason


def empty_rollout(prompt: Prompt, index: int, sampling_params: SamplingParams) -> Rollout:
    """A response that has no token yet."""
    nothing = Answer(text=None, thinking=None, value=None)
    return Rollout(
        prompt=prompt,
        index=index,
        segments=(),
        text="",
        answer=nothing,
        finish_reason=FinishReason.LENGTH,
        sampling_params=sampling_params,
    )


def append_generated(
    rollout: Rollout,
    generated: GeneratedTokens,
    sampling_params: SamplingParams,
    *,
    version: int,
    processor: QwenProcessor,
) -> Rollout:
    """The response with one more segment of POLICY, which the policy of `version` drew from `law`."""
    generated = _cut_at_stop_string(rollout, generated, sampling_params, processor)
    segment = Segment(
        token_ids=tuple(generated.ids),
        logprobs=tuple(generated.logps),
        author=Author.POLICY,
        version=version,
        sampling_params=None if sampling_params == rollout.sampling_params else sampling_params,
    )
    return processor.parse_rollout(
        replace(rollout, segments=(*rollout.segments, segment), finish_reason=generated.finish)
    )


class StopStringMatcher:
    """Tells whether the token drawn last completes a string that ends responses."""

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._strings, self._decode = strings, decode
        self.window_tokens = max(
            (len(string.encode()) for string in strings), default=0
        )  # no token is less than a byte
        self._last_chars = {string[-1] for string in strings}
        self._may_complete: dict[int, bool] = {}

    def matches_end(self, ids: Sequence[int]) -> bool:
        """Whether one ends within the last of `ids`; none did before."""
        if not self._strings:
            return False
        last = ids[-1]
        if last not in self._may_complete:  # most tokens lack the last character, and need no look at what came before
            text = self._decode([last])
            self._may_complete[last] = any(char in text or not char.isascii() for char in self._last_chars)
        return self._may_complete[last] and any(
            string in self._decode(ids[-self.window_tokens :]) for string in self._strings
        )


def _cut_at_stop_string(
    rollout: Rollout, generated: GeneratedTokens, sampling_params: SamplingParams, processor: QwenProcessor
) -> GeneratedTokens:
    """What was drawn, up to the token that completes a stop string begun before: engines look at new tokens alone."""
    if not (sampling_params.stop and rollout.segments) or rollout.finish_reason is not FinishReason.LENGTH:
        return generated
    own = takewhile(lambda segment: segment.author is Author.POLICY, reversed(rollout.segments))
    stops = StopStringMatcher(sampling_params.stop, processor.decode)
    before = [token for segment in [*own][::-1] for token in segment.token_ids][-stops.window_tokens :]
    for count in range(1, min(stops.window_tokens, len(generated.ids) + 1) if before else 0):
        if stops.matches_end([*before, *generated.ids[:count]]):
            return GeneratedTokens(generated.ids[:count], generated.logps[:count], FinishReason.STOP)
    return generated
