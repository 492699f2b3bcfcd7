"""Rollouts by transformers: a prompt and its media are encoded once, then the cache is repeated for its rollouts.

Letters: B prompts, P prompt columns, R rows (one per rollout), K cached columns, S columns of what there is of a
response already, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from mmrl.algo.seeds import derive_seed
from mmrl.policy.batch import collate_prompts, collate_responses
from mmrl.policy.logits import compute_logprobs, sample_tokens
from mmrl.policy.processor import QwenProcessor
from mmrl.policy.qwen_vl import Policy
from mmrl.rollout.responses import GeneratedTokens, StopStringMatcher, append_generated, empty_rollout
from mmrl.types import FinishReason, Prompt, Rollout, SamplingParams

if TYPE_CHECKING:
    from transformers import Cache

_MAX_BATCH_TOKENS = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeState:
    """What stands before the next token of each rollout: its logits, key mask and position."""

    cache: Cache
    logits_RV: torch.Tensor
    keep_RK: torch.Tensor
    next_position_R: torch.Tensor


class HfSampler:
    """Samples from the live policy; a row's random numbers derive from (salt, step, sample id, index) alone.

    Rows are drawn in parts whose caches hold at most `tokens_at_once` tokens, padding included; what is drawn does not
    depend on it.
    """

    def __init__(
        self,
        policy: Policy,
        processor: QwenProcessor,
        *,
        salt: Sequence[str | int],
        version: int = 0,
        max_batch_tokens: int = _MAX_BATCH_TOKENS,
    ) -> None:
        self._policy = policy
        self._processor = processor
        self._salt = tuple(salt)
        self._version = version
        self._max_batch_tokens = max_batch_tokens
        self._eos_id: int = processor.tokenizer.eos_token_id

    def sync(self, version: int) -> None:
        """The weights are shared with the learner, so only the version changes."""
        self._version = version

    def close(self) -> None:
        """Nothing was started."""

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling_params: SamplingParams, *, step: int
    ) -> list[list[Rollout]]:
        """`group_size` rollouts per prompt, in order."""
        empty = [empty_rollout(prompt, index, sampling_params) for prompt in prompts for index in range(group_size)]
        drawn = self.extend(empty, sampling_params, step=step)
        return [drawn[start : start + group_size] for start in range(0, len(drawn), group_size)]

    def extend(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams, *, step: int) -> list[Rollout]:
        """Go on behind each rollout's last token; what is drawn becomes one more segment of POLICY."""
        stops = StopStringMatcher(sampling_params.stop, self._processor.decode)
        drawn = [
            row
            for part in self._split_into_batches(rollouts, sampling_params)
            for row in self._generate_batch(part, sampling_params, stops, step)
        ]
        return [self._append_generated(*row, sampling_params, stops) for row in zip(rollouts, drawn, strict=True)]

    def _split_into_batches(
        self, rollouts: Sequence[Rollout], sampling_params: SamplingParams
    ) -> Iterator[list[Rollout]]:
        part: list[Rollout] = []
        longest = 0
        for rollout in rollouts:
            length = len(rollout.prompt.token_ids) + rollout.num_tokens + sampling_params.max_new_tokens
            if part and max(longest, length) * (len(part) + 1) > self._max_batch_tokens:
                yield part
                part, longest = [], 0
            part.append(rollout)
            longest = max(longest, length)
        if part:
            yield part

    @torch.no_grad()
    def _generate_batch(
        self, rollouts: Sequence[Rollout], sampling_params: SamplingParams, stop_matcher: StopStringMatcher, step: int
    ) -> Iterator[tuple[list[int], list[float]]]:
        """New tokens and their log-probs, rollout by rollout."""
        prefix = self._prefill(rollouts)
        uniforms = np.stack([self._draw_uniforms(rollout, sampling_params, step) for rollout in rollouts])
        ids_RT, logps_RT = self._decode(
            prefix, sampling_params, stop_matcher, torch.from_numpy(uniforms).to(self._policy.device)
        )
        for ids, logps in zip(ids_RT.tolist(), logps_RT.tolist(), strict=True):
            count = ids.index(-1) if -1 in ids else len(ids)
            yield ids[:count], logps[:count]

    def _prefill(self, rollouts: Sequence[Rollout]) -> _DecodeState:
        """Each prompt is encoded once; behind it, row by row, what there is of the responses."""
        device = self._policy.device
        prompts = {rollout.prompt.digest: rollout.prompt for rollout in rollouts}
        places = {digest: place for place, digest in enumerate(prompts)}
        batch = collate_prompts(list(prompts.values()), self._processor, pad_id=self._eos_id)
        cache, logits_BV = self._policy.prefill(batch)
        of_R = torch.tensor([places[rollout.prompt.digest] for rollout in rollouts], device=device)
        cache.batch_select_indices(of_R)
        logits_RV, keep_RK = logits_BV[of_R], batch.attention_mask_BP.to(device)[of_R]
        next_R = (batch.position_ids_3BP.amax(dim=(0, 2)) + 1).to(device)[of_R]
        if any(rollout.num_tokens for rollout in rollouts):
            tails = collate_responses(rollouts, self._processor, pad_id=self._eos_id).to(device)
            keep_RK = torch.cat([keep_RK, tails.attention_mask_BP], dim=1)
            begun_R = tails.attention_mask_BP.any(dim=1)
            tails = replace(tails, position_ids_3BP=tails.position_ids_3BP + next_R[:, None])
            after_RV = self._policy.append(cache, tails, keep_RK)
            logits_RV = torch.where(begun_R[:, None], after_RV, logits_RV)
            next_R = torch.where(begun_R, tails.position_ids_3BP.amax(dim=(0, 2)) + 1, next_R)
        return _DecodeState(cache=cache, logits_RV=logits_RV, keep_RK=keep_RK, next_position_R=next_R)

    def _decode(
        self,
        state: _DecodeState,
        sampling_params: SamplingParams,
        stop_matcher: StopStringMatcher,
        uniforms_RT: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token by token until every row has ended. Ended rows leave the computation; their tokens stay at -1."""
        cache, logits_RV, keep_RK, next_R = state.cache, state.logits_RV, state.keep_RK, state.next_position_R
        rows, steps = len(logits_RV), sampling_params.max_new_tokens
        ids_RT = torch.full((rows, steps), -1, device=logits_RV.device)
        logps_RT = torch.zeros(rows, steps, device=logits_RV.device)
        alive = torch.arange(rows, device=logits_RV.device)
        for t in range(steps):
            logps_RV = compute_logprobs(
                logits_RV, sampling_params.effective_temperature, sampling_params.banned_token_ids
            )
            token_R = sample_tokens(logps_RV, sampling_params, uniforms_RT[alive, t])
            ids_RT[alive, t] = token_R
            logps_RT[alive, t] = logps_RV.gather(-1, token_R[:, None]).squeeze(-1)
            goes_R = token_R != self._eos_id
            if sampling_params.stop:
                lately = ids_RT[alive, max(0, t + 1 - stop_matcher.window_tokens) : t + 1].tolist()
                goes_R &= ~torch.tensor([*map(stop_matcher.matches_end, lately)], device=goes_R.device)
            going = goes_R.nonzero().squeeze(-1)
            if not len(going) or t + 1 == steps:
                break
            if len(going) < len(alive):
                cache.batch_select_indices(going)
                alive, keep_RK, next_R = alive[going], keep_RK[going], next_R[going]
            keep_RK = torch.nn.functional.pad(keep_RK, (0, 1), value=1)
            logits_RV = self._policy.append_text(cache, token_R[going, None], keep_RK, next_R[:, None] + t)
        return ids_RT.cpu(), logps_RT.cpu()

    def _draw_uniforms(self, rollout: Rollout, sampling_params: SamplingParams, step: int) -> np.ndarray:
        begun = (len(rollout.segments),) if rollout.segments else ()
        seed = derive_seed(*self._salt, step, rollout.prompt.sample.id, rollout.index, *begun)
        return np.random.Generator(np.random.Philox(seed)).random(sampling_params.max_new_tokens)

    def _append_generated(
        self,
        rollout: Rollout,
        generated: tuple[list[int], list[float]],
        sampling_params: SamplingParams,
        stop_matcher: StopStringMatcher,
    ) -> Rollout:
        """A rollout with one more segment."""
        ids, logps = generated
        finish = FinishReason.STOP if stop_matcher.matches_end(ids) else FinishReason.LENGTH
        finish = FinishReason.EOS if ids[-1] == self._eos_id else finish
        return append_generated(
            rollout,
            GeneratedTokens(ids, logps, finish),
            sampling_params,
            version=self._version,
            processor=self._processor,
        )
