"""Schedules over the steps of a stage: the learning rate, and the coefficients of the loss's terms."""

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
    """Return the learning rate of one optimizer step.

    Warm-up is the straight line from 0 before the first step to `peak` at step `warmup` - 1, so that no step is spent
    at rate 0. Then the rate falls to `final_frac` * `peak` at the last step: linearly, or as half a cosine.

    Source: SGDR (arXiv:1608.03983, eq. 5) for the cosine, without its restarts.

    Args:
        step: the optimizer step, from 0 to `total` - 1.
        total: steps of the stage.
        peak: largest rate.
        warmup: steps of warm-up; 0 starts at `peak`.
        decay: shape of the fall after the warm-up.
        final_frac: fraction of `peak` that is left at the last step.

    Raises:
        ValueError: `step` is outside the stage.
    """
    if not 0 <= step < total:
        raise ValueError(f"step {step} is outside a stage of {total} steps")
    if step < warmup:
        return peak * (step + 1) / warmup
    peak_step = max(warmup - 1, 0)
    progress = (step - peak_step) / max(total - 1 - peak_step, 1)
    match decay:
        case "constant":
            left = 1.0
        case "linear":
            left = 1.0 - progress
        case "cosine":
            left = (1.0 + cos(pi * progress)) / 2.0
    return peak * (final_frac + (1.0 - final_frac) * left)


def coefficient(step: int, *, total: int, options: LossCoefficientConfig) -> float:
    """Return the coefficient of a term of the loss at one step: the curve of the learning rate, without warm-up.

    Raises:
        ValueError: `step` is outside the stage.
    """
    return learning_rate(
        step, total=total, peak=options.coef, warmup=0, decay=options.schedule, final_frac=options.final_frac
    )
