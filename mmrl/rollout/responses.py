"""Builds responses from generated tokens: an empty rollout, then one segment by POLICY for each call of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from mmrl.policy.processor import PromptProcessor
from mmrl.types import Answer, Author, ExpertRoutes, FinishReason, Prompt, Rollout, SamplingParams, Segment


class GeneratedTokens(NamedTuple):
    """Tokens that an engine generated after a prompt or a response in one call."""

    token_ids: Sequence[int]
    """Token ids, the one that ended the response included."""
    logprobs: Sequence[float]
    """Log-probability of each token in nats, under the distribution it was drawn from."""
    finish_reason: FinishReason
    """The reason why the engine stopped there."""
    prompt_routes: ExpertRoutes | None = None
    """Experts that the prompt's tokens went to; None if the engine records no routes."""
    response_routes: ExpertRoutes | None = None
    """Experts of all response tokens that the engine has read, in earlier calls too, but not of the last token. None if
    it records no routes."""


def empty_rollout(prompt: Prompt, index: int, sampling_params: SamplingParams) -> Rollout:
    """Return a response to `prompt` without any token."""
    return Rollout(
        prompt=prompt,
        index=index,
        segments=(),
        text="",
        answer=Answer(text=None, thinking=None, value=None),
        finish_reason=FinishReason.LENGTH,
        sampling_params=sampling_params,
    )


def append_generated(
    rollout: Rollout,
    generated: GeneratedTokens,
    sampling_params: SamplingParams,
    version: int,
    processor: PromptProcessor,
) -> Rollout:
    """Append a segment by POLICY of policy `version`, drawn under `sampling_params`, and parse the response again."""
    # Only a response that an earlier call left unfinished can have begun a stop string there.
    if rollout.finish_reason is FinishReason.LENGTH and rollout.segments and sampling_params.stop:
        generated = _cut_at_stop_string(rollout, generated, sampling_params, processor)
    routes = None
    if generated.response_routes is not None:
        num_tokens = rollout.num_tokens
        rollout = _complete_routes(rollout, generated.prompt_routes, generated.response_routes)
        routes = generated.response_routes.cut(num_tokens, num_tokens + len(generated.token_ids))
    # None means the rollout's own parameters, so that records of most rollouts name them once.
    segment = Segment(
        token_ids=tuple(generated.token_ids),
        logprobs=tuple(generated.logprobs),
        author=Author.POLICY,
        version=version,
        sampling_params=None if sampling_params == rollout.sampling_params else sampling_params,
        routes=routes,
    )
    longer = replace(rollout, segments=(*rollout.segments, segment), finish_reason=generated.finish_reason)
    return processor.parse_rollout(longer)


def _complete_routes(rollout: Rollout, prompt_routes: ExpertRoutes | None, response_routes: ExpertRoutes) -> Rollout:
    """Return the rollout with routes for the tokens that had none.

    A token keeps the routes of the call that first read it: the log-probs of its segment were recorded with them, and
    a later call may use newer weights.
    """
    segments = []
    start = 0
    for segment in rollout.segments:
        end = start + len(segment.token_ids)
        routes = response_routes.cut(start, end)
        if segment.routes is not None:
            unread = routes.cut(segment.routes.num_tokens, routes.num_tokens)
            routes = segment.routes.extended_by(unread)
        segments.append(replace(segment, routes=routes))
        start = end
    return replace(rollout, segments=tuple(segments), prompt_routes=rollout.prompt_routes or prompt_routes)


class StopStringMatcher:
    """Recognizes the token that completes a stop string."""

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._strings, self._decode = strings, decode
        # A token is at least one byte, so no stop string is spread over more tokens than it has bytes.
        self.window_tokens = max(map(len, map(str.encode, strings)), default=0)
        self._last_chars = {string[-1] for string in strings}
        self._may_complete: dict[int, bool] = {}

    def matches_end(self, ids: Sequence[int]) -> bool:
        """Return True if the last of `ids` completes a stop string. No token before it may have completed one."""
        if not self._strings:
            return False
        last = ids[-1]
        # Most tokens do not contain the last character of a stop string. Remembering which do saves decoding the window
        # for each token of each response. A character beyond ASCII may be spread over tokens that decode to none.
        if last not in self._may_complete:
            text = self._decode([last])
            self._may_complete[last] = any(char in text or not char.isascii() for char in self._last_chars)
        if not self._may_complete[last]:
            return False
        window = self._decode(ids[-self.window_tokens :])
        return any(string in window for string in self._strings)


def _cut_at_stop_string(
    rollout: Rollout, generated: GeneratedTokens, sampling_params: SamplingParams, processor: PromptProcessor
) -> GeneratedTokens:
    """Cut generated tokens after the one that completes a stop string which the policy began in an earlier segment.

    Engines match stop strings only within the tokens of one call, so they miss a string that lies across two calls.
    """
    matcher = StopStringMatcher(sampling_params.stop, processor.decode)
    # A stop string may begin only in the text that the policy wrote since another author's last segment.
    earlier: list[int] = []
    for earlier_segment in rollout.segments:
        earlier = [*earlier, *earlier_segment.token_ids] if earlier_segment.author is Author.POLICY else []
    earlier = earlier[-matcher.window_tokens :]
    if not earlier:
        return generated
    for count in range(1, min(matcher.window_tokens, len(generated.token_ids) + 1)):
        if matcher.matches_end([*earlier, *generated.token_ids[:count]]):
            return generated._replace(
                token_ids=generated.token_ids[:count],
                logprobs=generated.logprobs[:count],
                finish_reason=FinishReason.STOP,
            )
    return generated
