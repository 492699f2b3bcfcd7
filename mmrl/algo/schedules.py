"""Schedules over the steps of a stage: the learning rate, and the coefficients of loss terms."""

from __future__ import annotations

from math import cos, pi
from typing import Literal

from mmrl.config.schema import LossCoefficientConfig, OptimizerConfig


def learning_rate(step: int, *, total: int, options: OptimizerConfig) -> float:
    """Return the learning rate of a training step, counted from 0 to `total` - 1.

    Warm-up is the straight line from 0 before the first step to the peak at step `warmup_steps` - 1. Then the rate
    falls to `final_lr_frac` of the peak.
    """
    warmup = options.warmup_steps
    if step < warmup:
        # `step + 1`, or the rate of the first step would be 0.
        return options.lr * (step + 1) / warmup
    last = (options.decay_steps or total) - 1
    return options.lr * _decay(step, max(warmup - 1, 0), last, options.lr_schedule, options.final_lr_frac)


def coefficient(step: int, *, total: int, options: LossCoefficientConfig) -> float:
    """Return the coefficient of a loss term at one step. It follows the learning rate's curve, without warm-up."""
    last = (options.decay_steps or total) - 1
    return options.coef * _decay(step, 0, last, options.schedule, options.final_frac)


def _decay(
    step: int, first: int, last: int, curve: Literal["constant", "linear", "cosine"], final_frac: float
) -> float:
    """Return the factor of a schedule: 1 at step `first`, `final_frac` from step `last` on.

    Source: SGDR (arXiv:1608.03983, eq. 5) for the cosine, without its restarts.
    """
    progress = min((step - first) / max(last - first, 1), 1.0)
    match curve:
        case "constant":
            left = 1.0
        case "linear":
            left = 1.0 - progress
        case "cosine":
            left = (1.0 + cos(pi * progress)) / 2.0
    return final_frac + (1.0 - final_frac) * left
