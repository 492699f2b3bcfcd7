"""The policy term of the loss, per token; aggregation is in `aggregate`."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(
    ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and with dual clip at most -c A where A < 0.

    Source: PPO (arXiv:1707.06347, eq. 7), GRPO (arXiv:2402.03300 v3, eq. 3); separate bounds as in DAPO
    (arXiv:2503.14476, eq. 8); dual clip (arXiv:1912.09729, eq. 5), without effect while r <= c. At r = 1 the gradient
    is REINFORCE's, -A grad log policy.

    Args:
        ratio: r of each token, any shape.
        advantage: A of each token; broadcasts to `ratio`.
        clip_low: how far below 1 a ratio may fall and still matter.
        clip_high: how far above 1 a ratio may rise and still matter.
        dual_clip: c, above 1; None for no such bound.
    """
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    gain = torch.minimum(ratio * advantage, bounded * advantage)
    if dual_clip is not None:
        gain = torch.where(advantage < 0.0, torch.maximum(gain, dual_clip * advantage), gain)
    return -gain


def cispo(logprobs: Tensor, ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-clip(r, 1 - clip_low, 1 + clip_high) A log policy, r without gradient: every token keeps its gradient.

    Source: MiniMax-M1 (arXiv:2506.13585, eq. 4 and 5). Where nothing is clipped its gradient is that of the surrogate.

    Args:
        logp: log-probs of the sampled tokens under the policy in training, nats.
        ratio: r of each token, same shape.
        advantage: A of each token; broadcasts to `ratio`.
        clip_low: 1 - clip_low is the lower bound of r; 1 for none.
        clip_high: 1 + clip_high is the upper bound of r.
    """
    return -ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high) * advantage * logprobs
