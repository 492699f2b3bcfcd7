"""The distribution a token is drawn from, evaluated alike when sampling and when learning."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmrl.types import SamplingParams


def compute_logprobs(logits: torch.Tensor, temperature: float | torch.Tensor, banned: Sequence[int]) -> torch.Tensor:
    """Log-probabilities in nats, float32 [..., V], of logits [..., V] tempered by `divisor` (that of a law, or one for
    each row, [..., 1]), without the `banned` tokens.

    Top-p and top-k choose among these tokens when sampling but do not renormalise here, so a ratio between two policies
    stays finite when the kept set changes.
    """
    scaled = logits.float() / temperature
    if banned:
        scaled[..., list(banned)] = -torch.inf
    return torch.log_softmax(scaled, dim=-1)


def sample_tokens(logprobs: torch.Tensor, sampling_params: SamplingParams, uniforms: torch.Tensor) -> torch.Tensor:
    """One token per row, int64 [R], from log-probabilities [R, V] and uniform numbers [R] in [0, 1).

    Inverse-CDF sampling: a row's token depends on its own number alone, never on how rows are batched. Temperature 0
    takes the likeliest token. Top-p is a share of the mass that top-k leaves, as in transformers and vLLM.
    """
    if sampling_params.temperature == 0.0:
        return logprobs.argmax(dim=-1)
    mass = logprobs.double().exp()
    if not sampling_params.top_k and sampling_params.top_p == 1.0:
        return _invert_cdf(mass, uniforms)
    mass, order = mass.sort(dim=-1, descending=True)
    if sampling_params.top_k:
        mass[..., sampling_params.top_k :] = 0.0
    running = mass.cumsum(dim=-1)
    place = _invert_cdf(mass.masked_fill(running - mass >= sampling_params.top_p * running[..., -1:], 0.0), uniforms)
    return order.gather(-1, place.unsqueeze(-1)).squeeze(-1)


def _invert_cdf(mass: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The index at which the running sum of `mass` [R, V], not normalised, passes the share `uniforms` [R]."""
    running = mass.cumsum(dim=-1)
    threshold = uniforms.double().unsqueeze(-1) * running[..., -1:]
    # Rounding may lift a threshold onto the whole mass: then it is the last index that has any.
    last = (running < running[..., -1:]).sum(dim=-1)
    return torch.minimum((running <= threshold).sum(dim=-1), last)
