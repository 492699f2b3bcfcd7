"""When a run looks ill: thresholds of warnings, on means over the last steps."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mmrl.config.schema.base import Fraction, PositiveInt, StrictModel

PositiveFloat = Annotated[float, Field(gt=0.0)]


class HealthConfig(StrictModel):
    """Warnings with advice, each said when it begins to hold and not again while it lasts; null switches one off.

    None of them ends a run: `max_barren_steps` and `max_bad_steps` do.
    """

    window: PositiveInt = 20
    """Steps that are averaged; nothing is said before so many."""
    min_nonzero_advantage_frac: Fraction | None = 0.1
    """Share of groups that tell better from worse."""
    max_truncated_frac: Fraction | None = 0.5
    """Share of rollouts cut at max_new_tokens."""
    max_duplicate_frac: Fraction | None = 0.95
    """Share of rollouts whose text repeats a sibling's."""
    min_entropy: PositiveFloat | None = 0.005
    """Nats per token."""
    max_reference_kl: PositiveFloat | None = 1.0
    """Nats per token from the reference."""
    max_importance_ratio: PositiveFloat | None = 20.0
    """Largest ratio of new to old probability in a step."""
    max_failed_tool_call_frac: Fraction | None = 0.2
    """Share of calls at which a tool raises, or is killed at its deadline."""
    max_reward_term_drop: PositiveFloat | None = 0.1
    """How far a term's mean may lie below that of the first window while the total rises."""
    min_blind_gap: float | None = 0.02
    """Mean of a reward term minus its mean where a probe hides the media, for the term that loses most."""
