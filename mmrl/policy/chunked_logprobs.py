"""Log-probabilities and entropies of given tokens without the logits of a whole batch in memory.

Suffixes of tensor names: N scored tokens, W hidden channels, V tokens of the vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from mmrl.policy.logits import compute_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRequest:
    """The tokens of a batch to score, and the distribution that each was sampled from."""

    target_ids_N: torch.Tensor
    """Ids of the tokens to score, int64."""
    predictor_index_N: torch.Tensor
    """Index of the hidden state that predicts each of them, in the flattened batch, int64."""
    temperature_N: torch.Tensor
    """Divisor of each token's logits, above 0, float32."""
    banned_token_ids: tuple[int, ...]
    """Tokens with probability 0."""
    chunk_tokens: int
    """Tokens whose logits exist at a time."""

    def compute_logprobs(self, logits: torch.Tensor, tokens: slice) -> torch.Tensor:
        """Return log-probabilities in nats, float32 [C, V], from the logits [C, V] of the tokens of a slice."""
        return compute_logprobs(logits, self.temperature_N[tokens, None], self.banned_token_ids)


class LogprobHead(nn.Linear):
    """The output layer of a model; during `use_request` it returns log-probs and entropies in place of logits.

    It scores inside its own `forward`, because hooks on modules, such as DeepSpeed's that gather sharded weights, run
    around that call.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self._request: LogprobRequest | None = None

    @contextmanager
    def use_request(self, request: LogprobRequest) -> Iterator[None]:
        """Score the tokens of `request` in every forward inside this block."""
        self._request = request
        try:
            yield
        finally:
            self._request = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] of hidden states [..., W]; in `use_request`, float32 [2, N] in nats.

        The first row of the latter holds log-probabilities, the second entropies.
        """
        if self._request is None:
            return super().forward(hidden)
        request = self._request
        hidden_NW = hidden.flatten(0, -2)[request.predictor_index_N]
        scores_2N: torch.Tensor = _ChunkedLogprobs.apply(hidden_NW, self.weight, request)  # type: ignore[no-untyped-call]
        return scores_2N


class _LogprobContext(BackwardCFunction):
    request: LogprobRequest


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-probs l of given tokens and entropies H = -sum_j p_j log p_j, whose logits the backward pass computes again.

    With z the logits divided by the temperature: dl/dz_j = [j is the token] - p_j, dH/dz_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: _LogprobContext, hidden_NW: torch.Tensor, weight_VW: torch.Tensor, request: LogprobRequest
    ) -> torch.Tensor:
        """Return log-probs and entropies in nats, float32 [2, N], of hidden states [N, W] and weights [V, W]."""
        scores_2N = torch.empty(2, len(hidden_NW), device=hidden_NW.device)
        for chunk in _chunk_slices(len(hidden_NW), request.chunk_tokens):
            logprobs_CV = request.compute_logprobs(hidden_NW[chunk] @ weight_VW.T, chunk)
            scores_2N[0, chunk] = logprobs_CV.gather(-1, request.target_ids_N[chunk, None]).squeeze(-1)
            scores_2N[1, chunk] = torch.special.entr(logprobs_CV.exp_()).sum(dim=-1)
        ctx.save_for_backward(hidden_NW, weight_VW, scores_2N)
        ctx.request = request
        return scores_2N

    @staticmethod
    def backward(ctx: _LogprobContext, grad_2N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of hidden states [N, W] and weights [V, W], in their dtypes, where they are needed."""
        saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
        needs_grad: tuple[bool, ...] = ctx.needs_input_grad
        (hidden_NW, weight_VW, scores_2N), request = saved, ctx.request
        d_hidden_NW = torch.empty_like(hidden_NW) if needs_grad[0] else None
        # float32 even for bfloat16 weights: it is a sum over all chunks.
        d_weight_VW = torch.zeros(weight_VW.shape, device=weight_VW.device) if needs_grad[1] else None
        for chunk in _chunk_slices(len(hidden_NW), request.chunk_tokens):
            probs_CV = request.compute_logprobs(hidden_NW[chunk] @ weight_VW.T, chunk).exp_()
            d_logprob_C1, d_entropy_C1 = grad_2N[:, chunk, None]
            d_logits_CV = -probs_CV * (d_logprob_C1 + d_entropy_C1 * scores_2N[1, chunk, None])
            # Without an entropy bonus this gradient is 0; another tensor over the vocabulary is saved.
            if d_entropy_C1.any():
                d_logits_CV += d_entropy_C1 * torch.special.entr(probs_CV)
            d_logits_CV.scatter_add_(-1, request.target_ids_N[chunk, None], d_logprob_C1)
            d_logits_CV = (d_logits_CV / request.temperature_N[chunk, None]).to(hidden_NW.dtype)
            if d_hidden_NW is not None:
                d_hidden_NW[chunk] = d_logits_CV @ weight_VW
            if d_weight_VW is not None:
                d_weight_VW += d_logits_CV.T @ hidden_NW[chunk]
        return d_hidden_NW, None if d_weight_VW is None else d_weight_VW.to(weight_VW.dtype), None


def _chunk_slices(length: int, chunk_length: int) -> Iterator[slice]:
    for start in range(0, length, chunk_length):
        yield slice(start, min(start + chunk_length, length))
