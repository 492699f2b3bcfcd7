"""How far the policy has moved from a reference."""

from __future__ import annotations

import torch
from torch import Tensor


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Per-token estimate exp(d) - d - 1 of KL(policy || reference), d = ref_logp - logp, in nats; at least 0.

    Source: Schulman, "Approximating KL Divergence" (2020), the estimator k3; GRPO (arXiv:2402.03300 v3, eq. 4).
    Unbiased in value for tokens drawn from the policy; its gradient, as GRPO uses it, is not the gradient of the KL.

    Args:
        logp: log-probs of the sampled tokens under the policy in training, nats; any shape.
        ref_logp: the same under the reference, same shape; no gradient flows into it.
    """
    gap = ref_logp.detach() - logp
    return torch.expm1(gap) - gap
