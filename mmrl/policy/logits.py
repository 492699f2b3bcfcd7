"""The distribution that tokens are sampled from, computed alike in sampling and in learning.

Suffixes of tensor names: R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmrl.types import SamplingParams


def compute_logprobs(logits: torch.Tensor, temperature: float | torch.Tensor, banned: Sequence[int]) -> torch.Tensor:
    """Return log-probabilities in nats, float32 [..., V], of logits [..., V] of any float type.

    Top-p and top-k do not renormalise here, though they limit the choice in sampling: the ratio between two policies
    would be infinite for a token that one of them cuts off.

    Args:
        logits: outputs of the model, [..., V]; left as they are.
        temperature: divisor of the logits, above 0: one for all, or one a row, [..., 1].
        banned: ids of tokens with probability 0.
    """
    scaled = logits.float() / temperature
    if banned:
        scaled[..., list(banned)] = -torch.inf
    return torch.log_softmax(scaled, dim=-1)


def sample_tokens(logprobs: torch.Tensor, sampling_params: SamplingParams, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample one token a row by inverting the cumulative distribution; return ids, int64 [R].

    The token of a row depends on its own random number alone, never on the other rows of the batch.

    Args:
        logprobs: log-probabilities in nats, float32 [R, V].
        sampling_params: temperature 0 takes the likeliest token. Top-p is a share of the mass that top-k leaves, as in
            transformers and vLLM.
        uniforms: random numbers in [0, 1), one a row, [R].
    """
    if sampling_params.temperature == 0.0:
        return logprobs.argmax(dim=-1)
    mass_RV = logprobs.double().exp()
    if not sampling_params.top_k and sampling_params.top_p == 1.0:
        return _invert_cdf(mass_RV, uniforms)
    mass_RV, order_RV = mass_RV.sort(dim=-1, descending=True)
    if sampling_params.top_k:
        mass_RV[..., sampling_params.top_k :] = 0.0
    running_RV = mass_RV.cumsum(dim=-1)
    beyond_top_p_RV = running_RV - mass_RV >= sampling_params.top_p * running_RV[..., -1:]
    index_R = _invert_cdf(mass_RV.masked_fill(beyond_top_p_RV, 0.0), uniforms)
    return order_RV.gather(-1, index_R.unsqueeze(-1)).squeeze(-1)


def _invert_cdf(mass_RV: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    """Return the index where the running sum of a row passes a share of its whole, int64 [R].

    Args:
        mass_RV: probabilities that need not sum to 1, float64 [R, V].
        uniforms_R: the shares, in [0, 1), [R].
    """
    running_RV = mass_RV.cumsum(dim=-1)
    threshold_R1 = uniforms_R.double().unsqueeze(-1) * running_RV[..., -1:]
    # Rounding may lift a threshold onto the whole mass: then take the last index that has any.
    last_R = (running_RV < running_RV[..., -1:]).sum(dim=-1)
    return torch.minimum((running_RV <= threshold_R1).sum(dim=-1), last_R)
