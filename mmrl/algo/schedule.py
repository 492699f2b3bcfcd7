"""The learning rate and the weights of the loss's terms over a stage."""

from __future__ import annotations

from math import cos, pi
from typing import Literal

from mmrl.config.schema import LossCoefficientConfig


def learning_rate(
    step: int,
    *,
    total: int,
    peak: float,
    warmup: int,
    decay: Literal["constant", "linear", "cosine"],
    final_frac: float,
) -> float:
    """The rate of optimizer step `step`, counted from 0 to `total` - 1.

    Warm-up is the straight line from 0 before the first step to `peak` at step `warmup` - 1, so that no step is spent
    at rate 0. Then the rate falls to `final_frac` * `peak` at the last step: linearly, or as half a cosine (SGDR,
    arXiv:1608.03983, eq. 5, without restarts).

    Raises:
        ValueError: a step outside the stage.
    """
    if not 0 <= step < total:
        raise ValueError(f"step {step} is outside a stage of {total} steps")
    if step < warmup:
        return peak * (step + 1) / warmup
    top = max(warmup - 1, 0)
    progress = (step - top) / max(total - 1 - top, 1)
    match decay:
        case "constant":
            left = 1.0
        case "linear":
            left = 1.0 - progress
        case "cosine":
            left = (1.0 + cos(pi * progress)) / 2.0
    return peak * (final_frac + (1.0 - final_frac) * left)


def coefficient(step: int, *, total: int, options: LossCoefficientConfig) -> float:
    """The weight of a term of the loss at step `step`: the learning rate's curve without warm-up.

    Raises:
        ValueError: a step outside the stage.
    """
    return learning_rate(
        step, total=total, peak=options.coef, warmup=0, decay=options.schedule, final_frac=options.final_frac
    )
