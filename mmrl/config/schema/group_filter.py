"""Section `stages[].dynamic_sampling`: which groups of rollouts a step trains on."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from mmrl.config.schema.base import Fraction, PositiveInt, StrictModel, format_interval, pluralize


class GroupRewardRangeConfig(StrictModel):
    """A condition on one reward term of a group; groups without the term pass."""

    term: str
    """Name of the reward term. The total cannot be named: shaping would move it."""
    low: float = 0.0
    """Least mean of the term over the group."""
    high: float = 1.0
    """Largest mean of the term over the group."""
    require_mixed: bool = True
    """The term must also differ within the group (DAPO)."""

    @model_validator(mode="after")
    def _check_bounds(self) -> GroupRewardRangeConfig:
        if self.low > self.high:
            raise ValueError(f"low {self.low} must not exceed high {self.high}")
        return self

    def describe(self) -> str:
        """Return the condition as a phrase."""
        mixed = ", and its values differ" if self.require_mixed else ""
        return f"a group's mean of {self.term} is in {format_interval((self.low, self.high))}{mixed}"


class DynamicSamplingConfig(StrictModel):
    """Groups that are scored but not trained on; with `max_rounds` above 1, new prompts replace them.

    DAPO (arXiv:2503.14476, 3.2) is `require_mixed`. MM-EUREKA (arXiv:2503.07365) has a range of 0.1 to 0.9 and
    `extra: carry`. A range around 1/2 balances difficulty.
    """

    ranges: tuple[GroupRewardRangeConfig, ...] = ()
    """Conditions on reward terms; a group must meet all."""
    max_truncated_frac: Fraction = 1.0
    """Largest share of a group's rollouts that may be cut at max_new_tokens."""
    max_rounds: PositiveInt = 1
    """Rounds of `prompts_per_step` prompts at most, until as many groups pass; a step may train on fewer."""
    extra: Literal["drop", "carry"] = "drop"
    """Groups that pass beyond `prompts_per_step`: forgotten, or trained on first in the next step."""

    @model_validator(mode="after")
    def _check_not_empty(self) -> DynamicSamplingConfig:
        if not self.ranges and self.max_truncated_frac == 1.0:
            raise ValueError("without `ranges` or `max_truncated_frac` every group passes; set one of them")
        if self.extra == "carry" and self.max_rounds == 1:
            raise ValueError("`extra: carry` needs `max_rounds` of 2 or more: one round leaves no extra groups")
        return self

    def describe(self, prompts_per_step: int) -> str:
        """Return the conditions, a line each."""
        lines = [entry.describe() for entry in self.ranges]
        if self.max_truncated_frac < 1.0:
            lines.append(f"at most {self.max_truncated_frac:.0%} of a group's rollouts are truncated")
        if self.max_rounds > 1:
            rounds = pluralize(self.max_rounds, "round")
            extra = "are trained on in the next step" if self.extra == "carry" else "are dropped"
            lines.append(f"up to {rounds} of prompts until {prompts_per_step} groups pass; extra groups {extra}")
        return "\n".join(lines)
