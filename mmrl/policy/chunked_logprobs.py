"""Log-probabilities and entropies without the logits of a whole batch.

Letters: N scored tokens, W channels, V vocabulary.
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
    """Score `ids_N`, each at its temperature, where `banned` tokens cannot be; `source_N` are the hidden states that
    predict them, counted through the batch. Logits exist for `chunk` tokens at a time.
    """

    target_ids_N: torch.Tensor
    predictor_index_N: torch.Tensor
    temperature_N: torch.Tensor
    banned_token_ids: tuple[int, ...]
    chunk_tokens: int

    def compute_logprobs(self, logits: torch.Tensor, tokens: slice) -> torch.Tensor:
        """Log-probabilities of some of the tokens, from their logits."""
        return compute_logprobs(logits, self.temperature_N[tokens, None], self.banned_token_ids)


class LogprobHead(nn.Linear):
    """A model's output layer; while a request stands it gives scores instead of logits.

    It scores in its own forward, so that whoever hooks into modules (to gather sharded weights, say) is called.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self._request: LogprobRequest | None = None

    @contextmanager
    def use_request(self, request: LogprobRequest) -> Iterator[None]:
        """Score `request` in forwards within this block."""
        self._request = request
        try:
            yield
        finally:
            self._request = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., W]; or, asked to score, log-probs and entropies in nats, [2, N]."""
        if self._request is None:
            return super().forward(hidden)
        request = self._request
        rows_NW = hidden.flatten(0, -2)[request.predictor_index_N]
        scores_2N: torch.Tensor = _ChunkedLogprobs.apply(rows_NW, self.weight, request)  # type: ignore[no-untyped-call]
        return scores_2N


class _LogprobContext(BackwardCFunction):
    request: LogprobRequest


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-probs l of given tokens and entropies H = -sum p log p, whose logits are made again in the backward pass.

    With z the logits, tempered row by row: dl/dz_j = [j is the token] - p_j and dH/dz_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: _LogprobContext, hidden_NW: torch.Tensor, weight_VW: torch.Tensor, request: LogprobRequest
    ) -> torch.Tensor:
        scores_2N = torch.empty(2, len(hidden_NW), device=hidden_NW.device)
        for at in _chunk_slices(len(hidden_NW), request.chunk_tokens):
            logps = request.compute_logprobs(hidden_NW[at] @ weight_VW.T, at)
            scores_2N[0, at] = logps.gather(-1, request.target_ids_N[at, None]).squeeze(-1)
            scores_2N[1, at] = torch.special.entr(logps.exp_()).sum(dim=-1)
        ctx.save_for_backward(hidden_NW, weight_VW, scores_2N)
        ctx.request = request
        return scores_2N

    @staticmethod
    def backward(ctx: _LogprobContext, grad_2N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
        wanted: tuple[bool, ...] = ctx.needs_input_grad
        (hidden_NW, weight_VW, scores_2N), request = saved, ctx.request
        d_hidden = torch.empty_like(hidden_NW) if wanted[0] else None
        d_weight = torch.zeros(weight_VW.shape, device=weight_VW.device) if wanted[1] else None
        for at in _chunk_slices(len(hidden_NW), request.chunk_tokens):
            probs = request.compute_logprobs(hidden_NW[at] @ weight_VW.T, at).exp_()
            d_logp, d_entropy = grad_2N[:, at, None]
            d_logits = -probs * (d_logp + d_entropy * scores_2N[1, at, None])
            if d_entropy.any():
                d_logits += d_entropy * torch.special.entr(probs)
            d_logits.scatter_add_(-1, request.target_ids_N[at, None], d_logp)
            d_logits = (d_logits / request.temperature_N[at, None]).to(hidden_NW.dtype)
            if d_hidden is not None:
                d_hidden[at] = d_logits @ weight_VW
            if d_weight is not None:
                d_weight += d_logits.T @ hidden_NW[at]
        return d_hidden, None if d_weight is None else d_weight.to(weight_VW.dtype), None


def _chunk_slices(length: int, chunk: int) -> Iterator[slice]:
    for start in range(0, length, chunk):
        yield slice(start, min(start + chunk, length))
