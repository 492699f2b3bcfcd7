"""From a loss per token to one of the whole optimizer step: what each token weighs in it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.algo.importance import sequence_sums


def aggregation_weights(
    sequence_N: Tensor,
    aggregation: Literal["token", "sequence", "fixed"],
    *,
    num_tokens: int,
    num_sequences: int,
    lengths_N: Tensor,
) -> Tensor:
    """The factor of each trained token, float32 [N]; the loss is the sum of factor times token loss.

    token: 1 / tokens (DAPO, arXiv:2503.14476, eq. 8). sequence: 1 / (sequences x own tokens) (GRPO, arXiv:2402.03300
    v3, eq. 3). fixed: 1 / (sequences x length) (Dr.GRPO, arXiv:2503.20783, 3.2); with length 1 the sum over tokens of
    REINFORCE. All three are equal where every response has `length` tokens.

    Args:
        sequence_N: which response a token belongs to, int64 from 0.
        kind: which of the three.
        tokens: trained tokens of the whole step, over all micro-batches and ranks.
        sequences: responses of the whole step.
        lengths_N: what `fixed` divides by, for each token.
    """
    ones_N = torch.ones(len(sequence_N), device=sequence_N.device)
    match aggregation:
        case "token":
            return ones_N / num_tokens
        case "sequence":
            return ones_N / (num_sequences * sequence_sums(ones_N, sequence_N))
        case "fixed":
            return ones_N / (num_sequences * lengths_N)
