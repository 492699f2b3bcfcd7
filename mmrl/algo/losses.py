"""The terms of the RL loss, as pure functions of per-token tensors.

The suffix N of tensor names means trained tokens, those of any number of responses one after the other. `response_N` is
the index of the response that a token belongs to, int64 from 0. Log-probs and log ratios are in nats.

In the order of their use: importance ratios, the policy loss of each token, the KL penalty, correction weights for a
sampler whose probabilities differ from the learner's, the weight of each token in the loss of an update, and the
schedules of the learning rate and of the terms' coefficients.
"""

from __future__ import annotations

from math import cos, pi
from typing import Literal

import torch
from torch import Tensor

from mmrl.config.schema import LossCoefficientConfig

DecayCurve = Literal["constant", "linear", "cosine"]


def importance_ratios(log_ratio_N: Tensor, response_N: Tensor, level: Literal["token", "sequence"]) -> Tensor:
    """Return the importance ratio that multiplies each token's advantage, [N].

    token: exp(log_ratio), PPO (arXiv:1707.06347, eq. 6). sequence: the geometric mean over a response's tokens, GSPO
    (arXiv:2507.18071, eq. 7). For one token both are equal. `log_ratio_N` is current minus old log-probs.
    """
    if level == "token":
        return log_ratio_N.exp()
    # A mean of logs is the log of the geometric mean.
    mean_N = response_sums(log_ratio_N, response_N) / response_sums(torch.ones_like(log_ratio_N), response_N)
    return mean_N.exp()


def clipped_surrogate(
    ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) for each token, shaped like `ratio`.

    With dual clip, the loss is at most -c A where A < 0. At r = 1 the gradient is REINFORCE's, -A grad log policy.

    Source: PPO (arXiv:1707.06347, eq. 7), GRPO (arXiv:2402.03300 v3, eq. 3); separate bounds as in DAPO
    (arXiv:2503.14476, eq. 8); dual clip (arXiv:1912.09729, eq. 5), which has no effect while r <= c.

    Args:
        ratio: r of each token, any shape.
        advantage: A of each token; broadcasts to `ratio`.
        clip_low: how far below 1 a ratio may fall and still matter.
        clip_high: how far above 1 a ratio may rise and still matter.
        dual_clip: c, above 1; None for no such bound.
    """
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    # The minimum is pessimistic: clipping can only reduce the gain, so a token that has moved in the wrong direction
    # keeps its gradient.
    gain = torch.minimum(ratio * advantage, bounded * advantage)
    if dual_clip is not None:
        gain = torch.where(advantage < 0.0, torch.maximum(gain, dual_clip * advantage), gain)
    return -gain


def cispo(logprobs: Tensor, ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return -clip(r, 1 - clip_low, 1 + clip_high) A log policy for each token, with no gradient through r.

    A clipped token keeps its gradient, unlike under PPO. Where nothing is clipped the gradient is the surrogate's.

    Source: MiniMax-M1 (arXiv:2506.13585, eq. 4 and 5).

    Args:
        logprobs: log-probs of the sampled tokens under the policy in training, any shape.
        ratio: r of each token, same shape.
        advantage: A of each token; broadcasts to `ratio`.
        clip_low: 1 - clip_low is the lower bound of r; 1 for none.
        clip_high: 1 + clip_high is the upper bound of r.
    """
    # Detached, because the ratio only weights REINFORCE's gradient, which comes from `logprobs`.
    return -ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high) * advantage * logprobs


def estimate_kl(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"], *, log_ratio_clip: float | None = None
) -> Tensor:
    """Return an estimate of KL(policy || reference) at each token, nats, shaped like `logprobs`.

    With d = ref_logprobs - logprobs at a token that the policy sampled, k1 is -d, k2 is d^2 / 2, and k3 is
    exp(d) - d - 1. As a loss, k2 has the gradient of the KL on average, k3 that of KL(reference || policy), and k1 has
    none (arXiv:2506.09477); as part of the reward, k1 is the unbiased one.

    Source: Schulman, "Approximating KL Divergence" (2020). k2 is the penalty of REINFORCE++ (arXiv:2501.03262), k3 that
    of GRPO (arXiv:2402.03300 v3, eq. 4).

    Args:
        logprobs: log-probs of the sampled tokens under the policy in training, nats, any shape.
        ref_logprobs: the same under the reference, same shape; no gradient flows into it.
        estimator: which of the three.
        log_ratio_clip: keep d within +- this many nats, lest exp(d) overflow (Video-R1); no gradient flows beyond it.
    """
    # The papers write d as log ref - log policy: the sign is opposite to that of PPO's ratio.
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


def truncate_weights(weight: Tensor, high: float) -> Tensor:
    """Return min(w, high) for correction weights w of any shape: truncated importance sampling.

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025), TIS; the idea
    is Ionides, "Truncated Importance Sampling" (2008).
    """
    return weight.clamp(max=high)


def mask_weights(weight: Tensor, low: float, high: float) -> Tensor:
    """Return w inside [low, high] and 0 outside: tokens that sampler and learner disagree on too much do not train.

    Source: IcePop, Ling team, "Small Leak Can Sink a Great Ship" (2025); there low 0.5, high 5.
    """
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)


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

    Args:
        response_N: response of each token.
        aggregation: which of the three.
        num_tokens: tokens that the policy sampled for the whole update, over all micro-batches and ranks.
        num_responses: responses of the whole update.
        lengths_N: length that `fixed` divides by, for each token, [N].
    """
    # Denominators are those of the whole update, so the gradient does not depend on the cut into micro-batches.
    ones_N = torch.ones(len(response_N), device=response_N.device)
    match aggregation:
        case "token":
            return ones_N / num_tokens
        case "sequence":
            return ones_N / (num_responses * response_sums(ones_N, response_N))
        case "fixed":
            return ones_N / (num_responses * lengths_N)


def response_sums(values_N: Tensor, response_N: Tensor) -> Tensor:
    """Return, for each token, the sum of `values_N` over its response, [N] in the dtype of the values."""
    # A micro-batch may have no trained token at all, and max of an empty tensor raises.
    count = int(response_N.max()) + 1 if len(response_N) else 0
    return values_N.new_zeros(count).index_add(0, response_N, values_N)[response_N]


def suffix_sums(values_N: Tensor, response_N: Tensor) -> Tensor:
    """Return, for each token, the sum of `values_N` over it and the later tokens of its response, [N].

    The tokens of a response must be adjacent and in order.
    """
    # float64, because running sums also contain other responses, whose size would set the rounding error.
    running_N = values_N.double().cumsum(0)
    lengths = torch.bincount(response_N)
    ends_N = (lengths.cumsum(0) - 1)[response_N]
    return (running_N[ends_N] - running_N).to(values_N.dtype) + values_N


def learning_rate(
    step: int,
    *,
    total: int,
    peak: float,
    warmup: int,
    decay: DecayCurve,
    final_frac: float,
    decay_steps: int | None = None,
) -> float:
    """Return the learning rate of a training step, counted from 0 to `total` - 1.

    Warm-up is the straight line from 0 before the first step to `peak` at step `warmup` - 1. Then the rate falls to
    `final_frac` * `peak`, linearly or as half a cosine. It arrives at step `decay_steps` - 1, by default the last one,
    and stays there.

    Source: SGDR (arXiv:1608.03983, eq. 5) for the cosine, without its restarts.

    Raises:
        ValueError: `step` is outside the stage.
    """
    if not 0 <= step < total:
        raise ValueError(f"step {step} is outside a stage of {total} steps")
    if step < warmup:
        # `step + 1`, or the rate of the first step would be 0.
        return peak * (step + 1) / warmup
    peak_step = max(warmup - 1, 0)
    decay_end = (decay_steps or total) - 1
    progress = min((step - peak_step) / max(decay_end - peak_step, 1), 1.0)
    match decay:
        case "constant":
            left = 1.0
        case "linear":
            left = 1.0 - progress
        case "cosine":
            left = (1.0 + cos(pi * progress)) / 2.0
    return peak * (final_frac + (1.0 - final_frac) * left)


def coefficient(step: int, *, total: int, options: LossCoefficientConfig) -> float:
    """Return the coefficient of a loss term at one step. It follows the learning rate's curve, without warm-up.

    Raises:
        ValueError: `step` is outside the stage.
    """
    return learning_rate(
        step,
        total=total,
        peak=options.coef,
        warmup=0,
        decay=options.schedule,
        final_frac=options.final_frac,
        decay_steps=options.decay_steps,
    )
