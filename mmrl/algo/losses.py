"""The terms of the RL loss, as pure functions of per-token tensors.

The suffix N of tensor names is the number of trained tokens, with all responses concatenated. `response_N` is the index
of each token's response, int64 from 0. Log-probs and log ratios are in nats. Arguments without a suffix also have one
entry for each token, in any shape that they share.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.config.schema import RolloutCorrectionConfig
from mmrl.config.schema.base import PositiveFloat


def importance_ratios(log_ratio_N: Tensor, turn_N: Tensor, level: Literal["token", "sequence"]) -> Tensor:
    """Return the importance ratio that multiplies each token's advantage, [N].

    token: exp(log_ratio), PPO (arXiv:1707.06347, eq. 6). sequence: the geometric mean over a response's tokens, GSPO
    (arXiv:2507.18071, eq. 7). For one token both are equal. `log_ratio_N` is current minus old log-probs; `turn_N` is
    the index of each token's turn. A response is one turn unless its turns have their own advantages.
    """
    if level == "token":
        return log_ratio_N.exp()
    # A mean of logs is the log of the geometric mean.
    mean_N = response_sums(log_ratio_N, turn_N) / response_sums(torch.ones_like(log_ratio_N), turn_N)
    return mean_N.exp()


def clipped_surrogate(
    ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) for each token, shaped like `ratio`.

    r is the ratio of a token, A its advantage. `dual_clip` is a number c above 1: where A < 0, the loss is then at most
    -c A. At r = 1 the gradient is REINFORCE's, -A grad log policy.

    Source: PPO (arXiv:1707.06347, eq. 7), GRPO (arXiv:2402.03300 v3, eq. 3); separate bounds as in DAPO
    (arXiv:2503.14476, eq. 8); dual clip (arXiv:1912.09729, eq. 5), which has no effect while r <= c.
    """
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    # The minimum is pessimistic: clipping can only reduce the gain, so a token that has moved in the wrong direction
    # keeps its gradient.
    gain = torch.minimum(ratio * advantage, bounded * advantage)
    if dual_clip is not None:
        gain = torch.where(advantage < 0.0, torch.maximum(gain, dual_clip * advantage), gain)
    return -gain


def cispo(logprobs: Tensor, ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return -clip(r, 1 - clip_low, 1 + clip_high) A log policy for each token, shaped like `logprobs`.

    No gradient flows through r. A clipped token keeps its gradient, unlike under PPO. Where nothing is clipped the
    gradient is the surrogate's. A `clip_low` of 1 sets no lower bound.

    Source: MiniMax-M1 (arXiv:2506.13585, eq. 4 and 5).
    """
    # Detached, because the ratio only weights REINFORCE's gradient, which comes from `logprobs`.
    return -ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high) * advantage * logprobs


def mirror_descent(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, tau: PositiveFloat
) -> Tensor:
    """Return -A log policy + (tau / 2) s^2 / T for each of the T tokens of a response, [tokens]: a `policy_loss.fn`.

    s is the log ratio of the whole response, the sum of `logprobs` - `old_logprobs`. The sum over the tokens has the
    gradient of (A - tau s)^2 / (2 tau), which keeps the policy near the sampling policy without a clip.

    Source: Kimi k1.5 (arXiv:2501.12599, 2.3.2, eq. 3). Departures: none with `advantage: {scale: none}`, which makes A
    the reward minus the group's mean, and `aggregation: fixed` of length 1, which sums over tokens.
    """
    log_ratio = (mask * (logprobs - old_logprobs)).sum()
    return mask * (tau / 2.0 * log_ratio.square() / mask.sum() - advantages * logprobs)


def estimate_kl(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"], *, log_ratio_clip: float | None = None
) -> Tensor:
    """Return an estimate of KL(policy || reference) at each token, nats, shaped like `logprobs`.

    With d = ref_logprobs - logprobs at a token that the policy sampled, k1 is -d, k2 is d^2 / 2, and k3 is
    exp(d) - d - 1. As a loss, k2 has on average the gradient of the KL, k3 the gradient of KL(reference || policy), and
    k1 none (arXiv:2506.09477). As part of the reward, only k1 is unbiased. `log_ratio_clip`, in nats, bounds |d| so
    that exp(d) cannot overflow (Video-R1). No gradient flows where it clips, nor into the reference.

    Source: Schulman, "Approximating KL Divergence" (2020). REINFORCE++ (arXiv:2501.03262) penalizes with k2, GRPO
    (arXiv:2402.03300 v3, eq. 4) with k3.
    """
    # The papers write d as log ref - log policy: PPO's ratio has the opposite sign.
    log_ratio = ref_logprobs.detach() - logprobs
    if log_ratio_clip is not None:
        log_ratio = log_ratio.clamp(-log_ratio_clip, log_ratio_clip)
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio.square() / 2.0
        case "k3":
            # expm1, because exp(d) - 1 loses all digits where policy and reference almost agree.
            return torch.expm1(log_ratio) - log_ratio


def correction_weights(log_weight_N: Tensor, response_N: Tensor, options: RolloutCorrectionConfig) -> Tensor:
    """Return the importance weight w of the learner against the sampler for each token, [N] without gradient.

    tis: min(w, high), truncated importance sampling. Source: Yao et al., "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training" (2025); the idea is Ionides, "Truncated Importance Sampling" (2008).
    mask: w inside [low, high] and 0 outside, so a token does not train if sampler and learner disagree too much on it.
    Source: IcePop, Ling team, "Small Leak Can Sink a Great Ship" (2025); there low 0.5, high 5.

    `log_weight_N` are old minus recorded log-probs.
    """
    if options.method == "none":
        return torch.ones_like(log_weight_N)
    # A weight carries no gradient, because it corrects for tokens that are already sampled.
    log_weight_N = log_weight_N.detach()
    if options.level == "sequence":
        log_weight_N = response_sums(log_weight_N, response_N)
    weight_N = log_weight_N.exp()
    if options.method == "tis":
        return weight_N.clamp(max=options.high)
    return torch.where((weight_N >= options.low) & (weight_N <= options.high), weight_N, 0.0)


def aggregation_weights(
    response_N: Tensor,
    aggregation: Literal["token", "sequence", "fixed"],
    *,
    num_tokens: int,
    num_responses: int,
    lengths_N: Tensor,
) -> Tensor:
    """Return the factor of each token in the loss of an update, float32 [N]: the loss sums factor x token loss.

    token: 1 / tokens (DAPO, arXiv:2503.14476, eq. 8). sequence: 1 / (sequences x own tokens) (GRPO, arXiv:2402.03300
    v3, eq. 3). fixed: 1 / (sequences x length) (Dr.GRPO, arXiv:2503.20783, 3.2); with length 1 it is the sum over
    tokens of REINFORCE. All three are equal where every response has `length` tokens.

    `num_tokens` and `num_responses` count the policy's tokens and responses in the whole update, over all micro-batches
    and ranks, so the gradient does not depend on how they divide the update. `fixed` divides by `lengths_N`.
    """
    ones_N = torch.ones(len(response_N), device=response_N.device)
    match aggregation:
        case "token":
            return ones_N / num_tokens
        case "sequence":
            return ones_N / (num_responses * response_sums(ones_N, response_N))
        case "fixed":
            return ones_N / (num_responses * lengths_N)


def response_sums(values_N: Tensor, response_N: Tensor) -> Tensor:
    """Return, for each token, the sum of `values_N` over its response, [N] in the dtype of the values.

    The tokens of a response must be adjacent.
    """
    number_N = _number_responses(response_N)
    return torch.zeros_like(values_N).index_add(0, number_N, values_N)[number_N]


def suffix_sums(values_N: Tensor, response_N: Tensor) -> Tensor:
    """Return, for each token, the sum of `values_N` over it and the later tokens of its response, [N].

    The tokens of a response must be adjacent and in order.
    """
    # float64, because a running sum includes earlier responses, and its rounding error grows with their size.
    running_N = values_N.double().cumsum(0)
    number_N = _number_responses(response_N)
    lengths = torch.zeros_like(number_N).index_add(0, number_N, torch.ones_like(number_N))
    ends_N = (lengths.cumsum(0) - 1)[number_N]
    return (running_N[ends_N] - running_N).to(values_N.dtype) + values_N


def _number_responses(response_N: Tensor) -> Tensor:
    """Number the responses that have tokens, and return the number of each token's response, [N]."""
    # All numbers are below N, so sums fit [N], and the CPU need not wait for a GPU to count the responses.
    changes_N = torch.zeros_like(response_N)
    changes_N[1:] = response_N[1:] != response_N[:-1]
    return changes_N.cumsum(0)
