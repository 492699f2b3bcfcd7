"""How much likelier the policy makes what an older one sampled. N tokens of any number of sequences, one vector."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def importance_ratios(
    log_ratio_N: Tensor, sequence_N: Tensor, level: Literal["token", "sequence", "sequence_token"]
) -> Tensor:
    """The ratio that stands before the advantage of each token, [N].

    token: exp(log_ratio), PPO (arXiv:1707.06347, eq. 6). sequence: the geometric mean over a response's tokens, GSPO
    (arXiv:2507.18071, eq. 7). sequence_token: that value, of which each token owns the gradient of its own ratio,
    GSPO-token (eq. 14). Responses of one token have the same ratio in all three.

    Args:
        log_ratio_N: new minus old log-probs of tokens that are trained, nats.
        sequence_N: which response a token belongs to, int64 from 0.
        kind: which of the three.
    """
    if level == "token":
        return log_ratio_N.exp()
    mean_N = sequence_sums(log_ratio_N, sequence_N) / sequence_sums(torch.ones_like(log_ratio_N), sequence_N)
    if level == "sequence":
        return mean_N.exp()
    return (mean_N.detach() + log_ratio_N - log_ratio_N.detach()).exp()


def truncate_weights(weight: Tensor, high: float) -> Tensor:
    """Truncated importance sampling: min(w, high), the weight itself where `high` is never reached.

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025), TIS; the idea
    is Ionides, "Truncated Importance Sampling" (2008).
    """
    return weight.clamp(max=high)


def mask_weights(weight: Tensor, low: float, high: float) -> Tensor:
    """The weight inside [low, high], 0 outside: what sampler and learner disagree on too much teaches nothing.

    Source: IcePop, Ling team, "Small Leak Can Sink a Great Ship" (2025); there low 0.5, high 5.
    """
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)


def sequence_sums(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """The sum over a token's response, for each token, [N]."""
    count = int(sequence_N.max()) + 1 if len(sequence_N) else 0
    return values_N.new_zeros(count).index_add(0, sequence_N, values_N)[sequence_N]


def suffix_sums(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """The sum over a token and those after it in its response, [N]; a response's tokens stand together, in order."""
    running_N = values_N.double().cumsum(0)  # a response's own sum must not depend on what stands before it
    lengths = torch.bincount(sequence_N)
    ends_N = (lengths.cumsum(0) - 1)[sequence_N]
    return (running_N[ends_N] - running_N).to(values_N.dtype) + values_N
