"""Computes the distribution that tokens are sampled from, and log-probabilities of given tokens in chunks.

The engine `hf` and the learner both call `compute_logprobs`. Suffixes of tensor names as in `mmrl.policy.batch`: R rows
to sample from, V vocabulary, N trained tokens, W hidden channels, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmrl.types import SamplingParams

_SLICE_ROWS = 8192  # rows of the output matrix that are converted to float32 at a time: 117 MB at 3,584 channels


def compute_logprobs(
    logits: torch.Tensor, temperature: float | torch.Tensor, banned: Sequence[int] | torch.Tensor
) -> torch.Tensor:
    """Return log-probabilities in nats, float32 [..., V], of logits [..., V] of any float type.

    Args:
        logits: outputs of the model, [..., V]; not changed.
        temperature: divisor of the logits, above 0; one number, or one for each row, [..., 1].
        banned: ids of tokens with probability 0; a tensor, int64, saves moving them to a GPU at each call.
    """
    scaled = logits.float() / temperature
    if len(banned):
        scaled.index_fill_(-1, torch.as_tensor(banned, device=scaled.device), -torch.inf)
    # Top-p and top-k restrict sampling, but do not renormalise log-probs: the ratio of two policies would be infinite
    # for a token that only one of them cuts off.
    return torch.log_softmax(scaled, dim=-1)


def sample_tokens(logprobs: torch.Tensor, sampling_params: SamplingParams, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample one token a row by inverting the cumulative distribution; return ids, int64 [R].

    Args:
        logprobs: log-probabilities in nats, float32 [R, V].
        sampling_params: temperature 0 takes the likeliest token.
        uniforms: random numbers in [0, 1), one a row, [R].
    """
    if sampling_params.temperature == 0.0:
        return logprobs.argmax(dim=-1)
    # Every row uses its own random number, so its token does not depend on what else is in the batch.
    mass_RV = logprobs.exp().double()
    if not sampling_params.top_k and sampling_params.top_p == 1.0:
        return _invert_cdf(mass_RV, uniforms)
    mass_RV, order_RV = mass_RV.sort(dim=-1, descending=True)
    if sampling_params.top_k:
        mass_RV[..., sampling_params.top_k :] = 0.0
    running_RV = mass_RV.cumsum(dim=-1)
    # Top-p is a share of the mass that top-k leaves, as in transformers and vLLM.
    beyond_top_p_RV = running_RV - mass_RV >= sampling_params.top_p * running_RV[..., -1:]
    index_R = _invert_cdf(mass_RV.masked_fill(beyond_top_p_RV, 0.0), uniforms)
    return order_RV.gather(-1, index_R.unsqueeze(-1)).squeeze(-1)


def _invert_cdf(mass_RV: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    """Return the index at which the running sum of a row exceeds the share `uniforms_R` of its total, int64 [R]."""
    running_RV = mass_RV.cumsum(dim=-1)
    threshold_R1 = uniforms_R.double().unsqueeze(-1) * running_RV[..., -1:]
    # Rounding may lift a threshold to the total: then take the last index that has any mass.
    last_R1 = torch.searchsorted(running_RV, running_RV[..., -1:].contiguous())
    index_R1 = torch.searchsorted(running_RV, threshold_R1, right=True)
    return torch.minimum(index_R1, last_R1).squeeze(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRequest:
    """The tokens of a batch to score, and the distribution that each was sampled from."""

    target_ids_N: torch.Tensor  # ids of the tokens to score, int64
    predictor_index_N: torch.Tensor  # index in the flattened batch of the hidden state that predicts each, int64
    temperature_N: torch.Tensor  # divisor of each token's logits, above 0, float32
    banned_token_ids: Sequence[int] | torch.Tensor  # tokens with probability 0; as a tensor on the device, int64
    chunk_tokens: int  # tokens whose logits are computed at a time; logits of a whole batch would not fit into memory


def compute_logits(hidden: torch.Tensor, weight_VW: torch.Tensor, *, is_float32: bool) -> torch.Tensor:
    """Return the logits [..., V] of hidden states [..., W], in their dtype or computed and returned in float32.

    For float32 the weights are converted `_SLICE_ROWS` rows at a time, which avoids a float32 copy of all of them.

    Source: MiniMax-M1, arXiv:2506.13585, "Computational Precision Mismatch in Generation and Training"; ScaleRL,
    arXiv:2510.13786: rounded to bfloat16, the logits of sampler and learner differ enough to move importance ratios.
    """
    if not is_float32:
        return hidden @ weight_VW.T
    if hidden.is_cuda and hidden.dtype == weight_VW.dtype == torch.bfloat16 and not torch.is_grad_enabled():
        # A product of two bfloat16 numbers is exact in float32, and CUDA can sum and return products in float32: the
        # same result from faster kernels, which vLLM uses too. Autograd does not support them.
        logits = torch.mm(hidden.flatten(0, -2), weight_VW.T, out_dtype=torch.float32)
        return logits.view(*hidden.shape[:-1], -1)
    hidden = hidden.float()
    logits = torch.empty(*hidden.shape[:-1], len(weight_VW), device=hidden.device)
    for start in range(0, len(weight_VW), _SLICE_ROWS):
        rows = slice(start, start + _SLICE_ROWS)
        logits[..., rows] = hidden @ weight_VW[rows].float().T
    return logits


class LogprobHead(nn.Linear):
    """The output layer of a model; during `use_request` it returns log-probs and entropies instead of logits."""

    is_float32 = False  # true if hidden states and weights are converted to float32 before their product

    def __init__(self, linear: nn.Linear) -> None:
        # `meta` allocates nothing. The old layer's weight is used, so a tied embedding stays tied.
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self._request: LogprobRequest | None = None

    @contextmanager
    def use_request(self, request: LogprobRequest) -> Iterator[None]:
        """Compute the log-probs of `request` in every forward inside this block."""
        self._request = request
        try:
            yield
        finally:
            self._request = None

    def forward(self, hidden: torch.Tensor) -> Any:  # noqa: ANN401  (a tensor, or two)
        """Return logits [..., V] of hidden states [..., W].

        In `use_request`, return log-probabilities and entropies, both float32 [N] in nats.
        """
        if self._request is None:
            return compute_logits(hidden, self.weight, is_float32=self.is_float32)
        # Tokens are scored inside this call, because hooks of modules run around it, such as those by which DeepSpeed
        # gathers sharded weights.
        hidden_NW = hidden.flatten(0, -2)[self._request.predictor_index_N]
        arguments = (hidden_NW, self.weight, self._request, self.is_float32, torch.is_grad_enabled())
        return _ChunkedLogprobs.apply(*arguments)  # type: ignore[no-untyped-call]


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-probs l of given tokens and entropies H = -sum_j p_j log p_j.

    The backward pass computes the logits of each chunk again. If all tokens fit into a single chunk, its probabilities
    are kept instead: nothing else needs that memory between the two passes.

    With z the logits divided by the temperature: dl/dz_j = [j is the token] - p_j, dH/dz_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  (torch gives it no type)
        hidden_NW: torch.Tensor,
        weight_VW: torch.Tensor,
        request: LogprobRequest,
        is_float32: bool,
        has_backward: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and entropies in nats, float32 [N], of hidden states [N, W] and weights [V, W]."""
        ctx.probs_CV = None
        scored_N, entropies_N = (torch.empty(len(hidden_NW), device=hidden_NW.device) for _ in range(2))
        for start in range(0, len(hidden_NW), request.chunk_tokens):
            chunk = slice(start, start + request.chunk_tokens)
            hidden_CW = hidden_NW[chunk]
            logits_CV = compute_logits(hidden_CW, weight_VW, is_float32=is_float32)
            logprobs_CV = compute_logprobs(logits_CV, request.temperature_N[chunk, None], request.banned_token_ids)
            scored_N[chunk] = logprobs_CV.gather(-1, request.target_ids_N[chunk, None]).squeeze(-1)
            probs_CV = logprobs_CV.exp()
            # A banned token counts as 0, but 0 times minus infinity would be NaN.
            logprobs_CV.clamp_(min=torch.finfo(logprobs_CV.dtype).min)
            entropies_N[chunk] = -logprobs_CV.mul_(probs_CV).sum(dim=-1)
            if has_backward and len(hidden_CW) == len(hidden_NW):
                ctx.probs_CV = probs_CV
        ctx.save_for_backward(hidden_NW, weight_VW, entropies_N)
        ctx.request, ctx.is_float32 = request, is_float32
        # Without an entropy bonus the gradient of entropies is then None rather than zeros.
        ctx.set_materialize_grads(False)
        return scored_N, entropies_N

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        d_scored_N: torch.Tensor | None,
        d_entropies_N: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of hidden states [N, W] and weights [V, W], in their dtypes, where they are needed."""
        hidden_NW, weight_VW, entropies_N = ctx.saved_tensors
        request: LogprobRequest = ctx.request
        if d_scored_N is None:
            d_scored_N = torch.zeros_like(entropies_N)
        d_hidden_NW = torch.empty_like(hidden_NW) if ctx.needs_input_grad[0] else None
        # float32 even for bfloat16 weights, because it sums over all chunks.
        d_weight_VW = torch.zeros(weight_VW.shape, device=weight_VW.device) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden_NW), request.chunk_tokens):
            chunk = slice(start, start + request.chunk_tokens)
            hidden_CW, temperature_C1 = hidden_NW[chunk], request.temperature_N[chunk, None]
            # Changed in place below, so another backward pass computes it again.
            probs_CV, ctx.probs_CV = ctx.probs_CV, None
            if probs_CV is None:
                logits_CV = compute_logits(hidden_CW, weight_VW, is_float32=ctx.is_float32)
                probs_CV = compute_logprobs(logits_CV, temperature_C1, request.banned_token_ids).exp_()
            d_logprob_C1 = d_scored_N[chunk, None] / temperature_C1
            # In place, because each pass over [C, V] costs as much as some layers of a small model.
            if d_entropies_N is None:
                d_logits_CV = probs_CV.mul_(-d_logprob_C1)
            else:
                d_entropy_C1 = d_entropies_N[chunk, None] / temperature_C1
                entropy_terms_CV = torch.special.entr(probs_CV)
                d_logits_CV = probs_CV.mul_(-d_logprob_C1 - d_entropy_C1 * entropies_N[chunk, None])
                d_logits_CV.addcmul_(d_entropy_C1, entropy_terms_CV)
            d_logits_CV.scatter_add_(-1, request.target_ids_N[chunk, None], d_logprob_C1)
            if d_hidden_NW is not None:
                d_hidden_NW[chunk] = _hidden_gradient(d_logits_CV, weight_VW, is_float32=ctx.is_float32)
            if d_weight_VW is not None and ctx.is_float32:
                d_weight_VW.addmm_(d_logits_CV.T, hidden_CW.float())
            elif d_weight_VW is not None:
                d_weight_VW += d_logits_CV.to(hidden_NW.dtype).T @ hidden_CW
        d_weight = None if d_weight_VW is None else d_weight_VW.to(weight_VW.dtype)
        return d_hidden_NW, d_weight, None, None, None


def _hidden_gradient(d_logits_CV: torch.Tensor, weight_VW: torch.Tensor, *, is_float32: bool) -> torch.Tensor:
    """Return the gradient of the hidden states of a chunk, [C, W], computed in the dtype of `compute_logits`."""
    if not is_float32:
        return d_logits_CV.to(weight_VW.dtype) @ weight_VW
    d_hidden_CW = torch.zeros(len(d_logits_CV), weight_VW.shape[1], device=weight_VW.device)
    for start in range(0, len(weight_VW), _SLICE_ROWS):
        rows = slice(start, start + _SLICE_ROWS)
        d_hidden_CW.addmm_(d_logits_CV[:, rows], weight_VW[rows].float())
    return d_hidden_CW
