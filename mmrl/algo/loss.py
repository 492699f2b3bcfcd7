"""The policy term of the loss."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(logp: Tensor, old_logp: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Per-token loss -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r = exp(logp - old_logp).

    Source: PPO (arXiv:1707.06347, eq. 7), summed over tokens in GRPO (arXiv:2402.03300 v3, eq. 3); separate bounds as
    in DAPO (arXiv:2503.14476, eq. 8). Aggregation over tokens is the caller's.

    Args:
        logp: log-probs of the sampled tokens under the policy in training, nats; any shape.
        old_logp: the same under the policy that sampled them; no gradient flows into it.
        advantage: A of each token; broadcasts to `logp`.
        clip_low: how far below 1 a ratio may fall and still matter.
        clip_high: how far above 1 a ratio may rise and still matter.
    """
    ratio = torch.exp(logp - old_logp.detach())
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantage, bounded * advantage)
