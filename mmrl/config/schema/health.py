"""Section `stages[].health`: thresholds of warnings."""

from __future__ import annotations

from mmrl.config.schema.base import Fraction, PositiveFloat, PositiveInt, StrictModel


class HealthConfig(StrictModel):
    """Thresholds of warnings about means over the last `window` steps; null switches one off.

    A warning is printed with advice when its threshold is first crossed, and not again while it stays crossed. None
    ends a run; `max_steps_without_signal` and `max_nonfinite_steps` do.
    """

    window: PositiveInt = 20
    """Steps that are averaged; no warning comes before so many."""
    min_nonzero_advantage_frac: Fraction | None = 0.1
    """Least share of groups with a nonzero advantage."""
    max_truncated_frac: Fraction | None = 0.5
    """Largest share of rollouts cut at max_new_tokens."""
    max_duplicate_frac: Fraction | None = 0.95
    """Largest share of rollouts whose text repeats another of their group."""
    min_entropy: PositiveFloat | None = 0.005
    """Least entropy of the policy, in nats per token."""
    max_reference_kl: PositiveFloat | None = 1.0
    """Largest KL divergence from the reference, in nats per token."""
    max_importance_ratio: PositiveFloat | None = 20.0
    """Largest ratio of new to old probability of a token in a step."""
    max_failed_tool_call_frac: Fraction | None = 0.2
    """Largest share of tool calls that raise or exceed their deadline."""
    max_reward_term_drop: PositiveFloat | None = 0.1
    """Largest fall of a reward term's mean below its mean over the first window, while the total rises."""
    min_blind_gap: float | None = 0.02
    """Least mean of a reward term minus its mean where a probe hides the media, of the term with the largest gap."""
