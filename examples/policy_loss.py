"""A policy loss of your own: Simple Policy Optimization, which pulls the ratio back instead of clipping it.

In an `rl` stage: `loss: {policy_loss: {fn: ./policy_loss.py:simple_policy_loss, args: {epsilon: 0.2}}}`
"""

from __future__ import annotations

from torch import Tensor


def simple_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, epsilon: float = 0.2
) -> Tensor:
    """Return -(r A - |A| (r - 1)^2 / (2 epsilon)) for each token of a response, [tokens].

    Unlike the clipped loss, it has a gradient wherever the ratio is, and its best ratio is 1 + epsilon for A > 0 and
    1 - epsilon for A < 0.

    Source: Simple Policy Optimization, arXiv:2401.16025.

    Args:
        logprobs: log-probs of the tokens under the policy in training, nats, [tokens]; they carry the gradient.
        old_logprobs: denominator of the ratio, [tokens].
        advantages: advantage of each token, [tokens].
        mask: True for tokens that count, [tokens].
        epsilon: distance of the best ratio from 1.
    """
    ratio = (logprobs - old_logprobs).exp()
    loss = -(ratio * advantages - advantages.abs() * (ratio - 1.0).square() / (2.0 * epsilon))
    return loss * mask
