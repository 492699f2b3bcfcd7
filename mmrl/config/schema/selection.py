"""Sections `dynamic_sampling` and `replay` of an rl stage: which rollouts it trains on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmrl.config.schema.base import (
    Fraction,
    Number,
    PositiveFraction,
    PositiveInt,
    StrictModel,
)
from mmrl.config.schema.presets import REPLAY_PRESETS, ReplayPreset, check_preset_applied


class GroupRewardRangeConfig(StrictModel):
    """A condition on one reward term of a group; groups without the term pass."""

    term: str
    """Name of the reward term. The total cannot be named, since shaping terms would shift it."""
    low: Number = 0.0
    """The mean of the term over the group must reach this value."""
    high: Number = 1.0
    """The mean of the term over the group must not exceed this value."""
    require_mixed: bool = True
    """The term must also differ within the group (DAPO)."""

    @model_validator(mode="after")
    def _check_bounds(self) -> GroupRewardRangeConfig:
        if self.low > self.high:
            raise ValueError(f"low {self.low} must not exceed high {self.high}")
        return self


class DynamicSamplingConfig(StrictModel):
    """Conditions that a scored group must meet to be trained on; with `max_rounds` above 1, new prompts replace others.

    DAPO (arXiv:2503.14476, 3.2) sets `require_mixed`. MM-EUREKA (arXiv:2503.07365) sets a range of 0.1 to 0.9 and
    `extra: carry`. A range around 1/2 selects prompts of medium difficulty.
    """

    ranges: tuple[GroupRewardRangeConfig, ...] = ()
    """Conditions on reward terms, of which a group must meet all."""
    max_truncated_frac: Fraction = 1.0
    """A group is left out if more than this share of its rollouts is cut at max_new_tokens."""
    max_rounds: PositiveInt = 1
    """A step samples at most this many rounds of prompts until `prompts_per_step` groups pass; it may train on
    fewer."""
    extra: Literal["drop", "carry"] = "drop"
    """Use of groups that pass beyond `prompts_per_step`: `drop` them, or `carry` them to be first in the next steps."""

    @model_validator(mode="after")
    def _check_not_empty(self) -> DynamicSamplingConfig:
        if not self.ranges and self.max_truncated_frac == 1.0:
            raise ValueError("without `ranges` or `max_truncated_frac` every group passes; set one of them")
        return self


class ReplayConfig(StrictModel):
    """Selective sample replay: rollouts with zero advantage are replaced by stored ones whose advantage was nonzero.

    They are drawn with p ∝ |A|^priority_exponent, and keep the advantage computed in their own group.
    Source: VL-Rethinker, arXiv:2504.08837.
    """

    preset: ReplayPreset = "default"
    """A published variant: it changes the defaults of the keys below, each of which may still be set."""
    drop_zero_advantage: bool = True
    """Leave out rollouts with advantage 0, from the loss and from its denominators."""
    capacity: PositiveInt | None = 1024
    """Rollouts that the buffer holds; rollouts of the oldest policy version leave first. Null is `target_fraction`
    of the rollouts of a step."""
    priority_exponent: Annotated[float, Field(ge=0.0, le=100.0)] = 1.0
    """A rollout is drawn in proportion to |A| to this power; 0 draws uniformly."""
    target_fraction: PositiveFraction = 1.0
    """Replay fills a step up to this share of a full step, which has prompts_per_step x group_size rollouts."""
    max_staleness: PositiveInt | None = 4
    """A rollout leaves the buffer when its oldest token is more than this many policy versions old; null: no limit."""
    without_replacement: bool = True
    """If true, a step trains on each rollout at most once. If false, the same rollout may be drawn several times, also
    one of the current step."""
    resample_fresh: bool = False
    """Draw the current step's rollouts by priority too, instead of training on each once; needs
    `without_replacement: false`."""
    old_logprobs: Literal["recorded", "recomputed"] = "recorded"
    """Denominator of a replayed rollout's importance ratio: the log-probabilities recorded when it was sampled, or
    the learner's at the start of the step."""

    @model_validator(mode="after")
    def _check_options(self) -> ReplayConfig:
        if self.resample_fresh and self.without_replacement:
            raise ValueError(
                "`resample_fresh` draws with replacement, which `without_replacement` forbids; "
                "set `without_replacement: false`"
            )
        if self.resample_fresh and not self.drop_zero_advantage:
            raise ValueError(
                "`resample_fresh` draws by |A|, so no rollout with advantage 0 stays; leave out "
                "`drop_zero_advantage: false`"
            )
        check_preset_applied(f"preset {self.preset!r}", REPLAY_PRESETS[self.preset], self.model_fields_set)
        return self
