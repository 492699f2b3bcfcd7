"""Generation with transformers: the rollouts of a group in one batch share the KV cache of their prompt.

Suffixes of tensors: B prompts, P columns of padded prompts or responses, R rows (one per rollout), T new tokens, V
vocabulary; 3 is the axes of a position (time, height, width). Of experts: X router layers, S columns of a pass, K
experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mmrl.policy.batch import TokenSpan, pad_left
from mmrl.policy.expert_routing import encode_routes, get_routes
from mmrl.policy.logprobs import compute_logprobs, sample_tokens
from mmrl.policy.policy import PolicyModel
from mmrl.policy.processor import PromptProcessor
from mmrl.rollout.engines.base import GenerationRequest, RolloutEngine
from mmrl.rollout.responses import GeneratedTokens, StopStringMatcher
from mmrl.rollout.weight_sync import WeightStream
from mmrl.types import ExpertRoutes, FinishReason, Rollout, SamplingParams
from mmrl.utils.activity import Activity
from mmrl.utils.torch_transfer import send, send_numbers

if TYPE_CHECKING:
    from mmrl.policy.decode_cache import DecodeCache

MAX_BATCH_TOKENS = 2**18  # tokens in all KV caches of a batch together; memory grows with them


class _Row(NamedTuple):
    """One continuation to generate."""

    rollout: Rollout  # prompt and response so far
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeState:
    """The model's state before the next token of each rollout."""

    cache: DecodeCache  # of all layers, with a row for each rollout
    # Logits of the next token, in the model's dtype, or float32 with `model.float32_output_layer`.
    logits_RV: torch.Tensor
    next_position_R: torch.Tensor  # M-RoPE position of the next token, equal on all three axes; int64


class HfEngine(RolloutEngine):
    """Generates with the learner's own model, or with a copy of it. In a batch, each prompt is encoded once."""

    def __init__(
        self,
        policy: PolicyModel,
        processor: PromptProcessor,
        *,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        copy_policy: bool = False,
        activity: Activity | None = None,
    ) -> None:
        """Create an engine; `max_batch_tokens` bounds the KV caches of one batch, padding included.

        Finished rollouts are counted in `activity`. With `copy_policy` the engine generates from a copy of the policy,
        and the learner may update the policy meanwhile. `load_weights` updates the copy.
        """
        self._learner_policy = self._policy = policy
        if copy_policy:
            self._policy = policy.frozen_copy()
            for name, weight in self._policy.trainable.items():
                # No gradient is computed here, but torch rounds products differently for tensors without this flag. The
                # copy must sample exactly the tokens that the learner's own model would sample.
                weight.requires_grad_(policy.trainable[name].requires_grad)
        self.shares_weights, self.returns_routes = not copy_policy, bool(policy.routers)
        self._processor, self._max_batch_tokens = processor, max_batch_tokens
        self._activity = activity or Activity()
        self._eos_id: int = processor.tokenizer.eos_token_id

    @torch.no_grad()
    def load_weights(self, weights: WeightStream) -> None:
        """Copy the learner's trained tensors, adapters included, unless they are shared. `weights` is not read."""
        if not self.shares_weights:
            learned = self._learner_policy.trainable
            for name, weight in self._policy.trainable.items():
                weight.copy_(learned[name])

    def logits_dtypes(self) -> set[str]:
        """Return the dtype that the policy computes logits in, such as `float32`."""
        return {str(self._policy.logits_dtype).removeprefix("torch.")}

    @torch.no_grad()
    def generate(
        self, requests: Sequence[GenerationRequest], sampling_params: SamplingParams, *, record_routes: bool = False
    ) -> list[list[GeneratedTokens]]:
        """Return the continuations of each request, in order."""
        matcher = StopStringMatcher(sampling_params.stop, self._processor.decode)
        rows = []
        for request in requests:
            rows += [_Row(request.rollout, seed) for seed in request.sample_seeds]
        self._activity.begin_count("rollout", len(rows))
        generated: list[GeneratedTokens] = []
        for batch in self._split_into_batches(rows, sampling_params):
            recorder = _RouteRecorder(self._policy.routers) if record_routes else None
            state = self._prefill([row.rollout for row in batch], recorder)
            uniforms = []
            for row in batch:
                # A generator for each row: a rollout must not depend on the others of its batch, nor on how rows are
                # divided into batches.
                generator = np.random.Generator(np.random.Philox(row.seed))
                uniforms.append(generator.random(sampling_params.max_new_tokens))
            uniforms_RT = send(torch.from_numpy(np.stack(uniforms)), self._policy.model.device)
            decoded = self._decode(state, sampling_params, matcher, uniforms_RT, recorder)
            del state  # its caches must be gone before those of the next batch are made
            for index, (token_ids, logprobs) in enumerate(decoded):
                finish_reason = self._find_end(token_ids, matcher) or FinishReason.LENGTH
                routes = (None, None) if recorder is None else recorder.routes_of(index)
                generated.append(GeneratedTokens(token_ids, logprobs, finish_reason, *routes))
        remaining = iter(generated)
        return [list(islice(remaining, request.num_samples)) for request in requests]

    def _split_into_batches(self, rows: Sequence[_Row], sampling_params: SamplingParams) -> Iterator[list[_Row]]:
        """Divide rows, in order, so that the padded sequences of each batch fit into `max_batch_tokens`."""
        batch: list[_Row] = []
        longest = 0
        for row in rows:
            num_tokens = len(row.rollout.prompt.token_ids) + row.rollout.num_tokens
            length = num_tokens + sampling_params.max_new_tokens
            if batch and max(longest, length) * (len(batch) + 1) > self._max_batch_tokens:
                yield batch
                batch, longest = [], 0
            batch.append(row)
            longest = max(longest, length)
        if batch:
            yield batch

    def _prefill(self, rollouts: Sequence[Rollout], recorder: _RouteRecorder | None) -> _DecodeState:
        """Run each prompt once, then the responses so far; return the state before the next token of each rollout."""
        from mmrl.policy.decode_cache import DecodeCache

        device = self._policy.model.device
        prompts = {rollout.prompt.digest: rollout.prompt for rollout in rollouts}
        spans = [TokenSpan.from_prompt(prompt, self._processor) for prompt in prompts.values()]
        batch = pad_left(spans, self._processor.placeholders, self._eos_id)
        cache, logits_BV = self._policy.prefill(batch)
        number_of_prompt = {digest: number for number, digest in enumerate(prompts)}
        prompt_of_row = [number_of_prompt[rollout.prompt.digest] for rollout in rollouts]
        prompt_of_R = send_numbers(prompt_of_row, device)
        if recorder is not None:
            recorder.record_prompts(batch.attention_mask_BP, prompt_of_row)
        shares_prompts = self._policy.supports_shared_prefix
        state = _DecodeState(
            cache=DecodeCache(cache, prompt_of_row, batch.attention_mask_BP, shares_prompts=shares_prompts),
            logits_RV=logits_BV[prompt_of_R],
            next_position_R=send(batch.position_ids_3BP.amax(dim=(0, 2)) + 1, device)[prompt_of_R],
        )
        if any(rollout.num_tokens for rollout in rollouts):
            return self._append_responses(state, rollouts, recorder)
        return state

    def _append_responses(
        self, state: _DecodeState, rollouts: Sequence[Rollout], recorder: _RouteRecorder | None
    ) -> _DecodeState:
        """Append the tokens that responses already have to the caches of their prompts."""
        spans = [TokenSpan.from_response(rollout, self._processor) for rollout in rollouts]
        responses = pad_left(spans, self._processor.placeholders, self._eos_id).to(self._policy.model.device)
        # Positions of responses count from 0; here they follow their prompts.
        positions_3RP = responses.position_ids_3BP + state.next_position_R[:, None]
        logits_RV = self._policy.append(state.cache, replace(responses, position_ids_3BP=positions_3RP))
        if recorder is not None:
            recorder.record(range(len(rollouts)), responses.attention_mask_BP)
        # A row without tokens keeps the state after its prompt: the model's output for padding means nothing.
        has_tokens_R = responses.attention_mask_BP.any(dim=1)
        return _DecodeState(
            cache=state.cache,
            logits_RV=torch.where(has_tokens_R[:, None], logits_RV, state.logits_RV),
            next_position_R=torch.where(has_tokens_R, positions_3RP.amax(dim=(0, 2)) + 1, state.next_position_R),
        )

    def _decode(
        self,
        state: _DecodeState,
        sampling_params: SamplingParams,
        matcher: StopStringMatcher,
        uniforms_RT: torch.Tensor,
        recorder: _RouteRecorder | None,
    ) -> list[tuple[list[int], list[float]]]:
        """Sample token by token until every row has ended; return token ids and log-probs, in nats, of each rollout.

        R counts rows that have not ended. `uniforms_RT` has a number in [0, 1) for each token, float64.
        """
        cache, logits_RV, next_R = state.cache, state.logits_RV, state.next_position_R
        device = self._policy.model.device
        max_new_tokens = sampling_params.max_new_tokens
        token_ids: list[list[int]] = [[] for _ in uniforms_RT]  # of each rollout
        rollout_of_row = list(range(len(token_ids)))  # a rollout that has ended has no row
        sampled_logprobs, rollout_of_logprob = [], []
        banned = send_numbers(sampling_params.banned_token_ids, device)
        for t in range(max_new_tokens):
            logprobs_RV = compute_logprobs(logits_RV, sampling_params.effective_temperature, banned)
            token_R = sample_tokens(logprobs_RV, sampling_params, uniforms_RT[:, t])
            sampled_logprobs.append(logprobs_RV.gather(-1, token_R[:, None]).squeeze(-1))
            rollout_of_logprob += rollout_of_row
            unended_rows = []
            # Here the host waits for the GPU, once for each token; it waits again where routes are recorded.
            for row, token in enumerate(token_R.tolist()):
                ids_of_row = token_ids[rollout_of_row[row]]
                ids_of_row.append(token)
                if self._find_end(ids_of_row, matcher) is None:
                    unended_rows.append(row)
            num_ended = len(rollout_of_row) - len(unended_rows)
            is_last = not unended_rows or t + 1 == max_new_tokens
            self._activity.advance("rollout", len(rollout_of_row) if is_last else num_ended)
            if is_last:
                break
            if num_ended:
                old_rows = cache.keep_rows(unended_rows)
                rollout_of_row = [rollout_of_row[row] for row in old_rows]
                old_rows_R = send_numbers(old_rows, device)
                token_R, next_R, uniforms_RT = token_R[old_rows_R], next_R[old_rows_R], uniforms_RT[old_rows_R]
            logits_RV = self._policy.append_text(cache, token_R, next_R + t)
            if recorder is not None:
                recorder.record(rollout_of_row, torch.ones(len(rollout_of_row), 1))
        logprobs: list[list[float]] = [[] for _ in token_ids]
        for rollout, logprob in zip(rollout_of_logprob, torch.cat(sampled_logprobs).tolist(), strict=True):
            logprobs[rollout].append(logprob)
        return list(zip(token_ids, logprobs, strict=True))

    def _find_end(self, ids: Sequence[int], matcher: StopStringMatcher) -> FinishReason | None:
        """Return why a response ends with the last of its new tokens, or None if it does not."""
        if ids[-1] == self._eos_id:
            return FinishReason.EOS
        return FinishReason.STOP if matcher.matches_end(ids) else None


class _RouteRecorder:
    """Collects which experts the forward passes of a batch of rollouts send their tokens to."""

    def __init__(self, routers: Sequence[Any]) -> None:
        self._routers = routers
        self._prompt_routes: list[ExpertRoutes] = []
        self._pieces: list[list[torch.Tensor]] = []

    def record_prompts(self, keep_BP: torch.Tensor, prompt_of_row: Sequence[int]) -> None:
        """Record the routes of the prompts' forward pass; `prompt_of_row` has the number of each rollout's prompt."""
        of_prompts = [self._encode([piece]) for piece in self._split(keep_BP)]
        self._prompt_routes = [of_prompts[prompt] for prompt in prompt_of_row]
        self._pieces = [[] for _ in self._prompt_routes]

    def record(self, rows: Sequence[int], keep_RS: torch.Tensor) -> None:
        """Record the routes of the last forward pass, over tokens of these rollouts; `keep_RS` is 0 for padding."""
        for row, piece in zip(rows, self._split(keep_RS), strict=True):
            self._pieces[row].append(piece)

    def routes_of(self, row: int) -> tuple[ExpertRoutes, ExpertRoutes]:
        """Return the routes of a rollout's prompt, an object that siblings share, and of the tokens read after it."""
        return self._prompt_routes[row], self._encode(self._pieces[row])

    def _split(self, keep_RS: torch.Tensor) -> list[torch.Tensor]:
        """Return the routes of each row of the last pass without padding, [tokens, X, K]."""
        routes_XRSK = get_routes(self._routers).cpu().view(-1, *keep_RS.shape, self._routers[0].top_k)
        routes_RSXK = routes_XRSK.permute(1, 2, 0, 3)
        return [routes_SXK[keep_S] for routes_SXK, keep_S in zip(routes_RSXK, keep_RS.bool().cpu(), strict=True)]

    def _encode(self, pieces: Sequence[torch.Tensor]) -> ExpertRoutes:
        router = self._routers[0]
        # A response whose first token ended it has no piece: the engine has read none of its tokens.
        empty = torch.zeros(0, len(self._routers), router.top_k, dtype=torch.int64)
        return encode_routes(torch.cat([empty, *pieces]), router.num_experts)
