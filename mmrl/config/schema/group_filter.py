"""Which groups of rollouts a step learns from."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from mmrl.config.schema.base import Fraction, PositiveInt, StrictModel


class GroupRewardRangeConfig(StrictModel):
    """What a reward term says of a group worth learning from; groups without the term pass."""

    term: str
    """Name of the reward term: never the total, which shaping moves."""
    low: float = 0.0
    """Least mean of the term over the group."""
    high: float = 1.0
    """Largest mean."""
    require_mixed: bool = True
    """The term must also differ within the group (DAPO)."""

    @model_validator(mode="after")
    def _check_bounds(self) -> GroupRewardRangeConfig:
        if self.low > self.high:
            raise ValueError(f"low {self.low} must not exceed high {self.high}")
        return self


class DynamicSamplingConfig(StrictModel):
    """Groups that are judged and not learned. With `rounds` above 1 others are asked in their place: DAPO
    (arXiv:2503.14476, 3.2) with `mixed`; balanced difficulty with a band around 1/2; MM-EUREKA (arXiv:2503.07365) with
    0.1 to 0.9 and `surplus: carry`.
    """

    ranges: tuple[GroupRewardRangeConfig, ...] = ()
    """All must hold."""
    max_truncated_frac: Fraction = 1.0
    """Largest share of a group's rollouts that may be cut at max_new_tokens."""
    max_rounds: PositiveInt = 1
    """Ask `prompts_per_step` so many times at most, until as many groups pass; a step may learn from fewer."""
    extra: Literal["drop", "carry"] = "drop"
    """What becomes of groups that pass beyond `prompts_per_step`: forgotten, or learned first in the next step."""

    @model_validator(mode="after")
    def _check_not_empty(self) -> DynamicSamplingConfig:
        if not self.ranges and self.max_truncated_frac == 1.0:
            raise ValueError("a filter without `bands` or `max_truncated` lets everything pass; set one")
        if self.extra == "carry" and self.max_rounds == 1:
            raise ValueError("`surplus: carry` needs `rounds` of 2 or more: one round has no surplus")
        return self
