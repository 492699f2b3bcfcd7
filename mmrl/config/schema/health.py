"""Section `health` of an rl stage: thresholds of warnings about a run that goes wrong."""

from __future__ import annotations

from mmrl.config.schema.base import PositiveFloat, PositiveInt, StrictModel


class HealthConfig(StrictModel):
    """Thresholds of warnings about means over the last `window` steps; null switches one off.

    A warning is printed with advice when its threshold is first crossed. It is printed again only after `window` steps
    without a crossing. Warnings never end a run: `max_steps_without_signal` and `max_nonfinite_steps` do. These
    thresholds are keys because they depend on the model's dtype and on `replay`; all others are constants of
    `mmrl/training/health.py`.
    """

    window: PositiveInt = 20
    """Steps that are averaged; no warning about a mean is printed before this many steps."""
    max_logprob_diff: PositiveFloat | None = 0.05
    """Warn above this mean |log-probability of the rollout engine - learner| of an on-policy token before the update,
    in nats."""
    max_stale_logprob_diff: PositiveFloat | None = 0.2
    """Warn above this mean difference of a token that the previous policy version sampled, in nats. The difference
    includes the change of one training step."""
    max_replay_staleness: PositiveFloat | None = 20.0
    """Warn above this age of the oldest rollout that a step replays, in policy versions."""
