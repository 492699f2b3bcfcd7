"""How far the policy has moved from a reference: per-token estimates of KL(policy || reference), in nats.

Source of all three: Schulman, "Approximating KL Divergence" (2020), with d = ref_logp - logp at a token that the policy
sampled. They are 0 where the two agree. As a loss, k2 has the gradient of the KL on average, k3 that of
KL(reference || policy), and k1 has none (arXiv:2506.09477); as a part of the reward k1 is the unbiased one.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def k1(log_ratio: Tensor) -> Tensor:
    """-d: unbiased, of either sign."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """d^2 / 2: biased in value, never negative; the penalty of REINFORCE++ (arXiv:2501.03262)."""
    return log_ratio.square() / 2.0


def k3(log_ratio: Tensor) -> Tensor:
    """exp(d) - d - 1: unbiased, never negative; the penalty of GRPO (arXiv:2402.03300 v3, eq. 4)."""
    return torch.expm1(log_ratio) - log_ratio


def estimate_kl(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"], *, log_ratio_clip: float | None = None
) -> Tensor:
    """One of the estimates, any shape; with `clamp`, of d kept within +- that many nats before anything else.

    Args:
        logp: log-probs of the sampled tokens under the policy in training, nats; any shape.
        ref_logp: the same under the reference, same shape; no gradient flows into it.
        estimator: which.
        clamp: as SEED-Bench-R1 and Video-R1 do, lest exp(d) overflow; no gradient flows beyond it.
    """
    gap = ref_logprobs.detach() - logprobs
    if log_ratio_clip is not None:
        gap = gap.clamp(-log_ratio_clip, log_ratio_clip)
    return {"k1": k1, "k2": k2, "k3": k3}[estimator](gap)
