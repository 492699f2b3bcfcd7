"""Section `stages[].replay`: selective sample replay, rollouts of earlier steps that are trained on again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import model_validator

from mmrl.config.schema.base import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    StrictModel,
    pluralize,
)
from mmrl.config.schema.presets import PresetSettings, check_preset_applied

ReplayPreset = Literal["default", "paper", "code"]

REPLAY_PRESETS: Mapping[ReplayPreset, PresetSettings] = {
    # The schema's own defaults: a rollout is replayed for a few steps at most, and once a step.
    "default": {},
    # VL-Rethinker, arXiv:2504.08837 v1, 3.2: rollouts with an advantage stay for the whole episode, here the stage,
    # and fill up the step by |A|^alpha. The paper sets no capacity; this one bounds the memory of a machine.
    "paper": {"capacity": 65536, "max_staleness": None, "without_replacement": False},
    # Its repository where replay runs (commit 4afedcd): half a step, drawn by |A| with replacement from the fresh
    # rollouts, filled up from a buffer of that size. Its extra positives have weight 0 there: they are never drawn.
    "code": {
        "capacity": None,
        "max_staleness": None,
        "without_replacement": False,
        "resample_fresh": True,
        "target_fraction": 0.5,
    },
}


class ReplayConfig(StrictModel):
    """Selective sample replay: rollouts without advantage are replaced by earlier ones that had one.

    They are drawn with p ∝ |A|^priority_exponent, and keep the advantage computed in their own group.
    Source: VL-Rethinker, arXiv:2504.08837.
    """

    preset: ReplayPreset = "default"
    """A published behaviour: other defaults for the keys below, each of which may still be set."""
    drop_zero_advantage: bool = True
    """Leave out rollouts with advantage 0, from the loss and from its denominators."""
    capacity: PositiveInt | None = 1024
    """Rollouts in the buffer, the oldest leaving first; null for `target_fraction` of a step."""
    priority_exponent: NonNegativeFloat = 1.0
    """Exponent of |A| in the probability of being drawn; 0 draws uniformly."""
    positive_advantage_weight: PositiveFloat = 1.0
    """Factor on the probability of rollouts with A > 0."""
    fill: Literal["size", "fraction"] = "size"
    """`size` replays what is missing from `target_fraction` of a full step; `fraction` makes replayed rollouts
    `target_fraction` of all that are trained on."""
    target_fraction: PositiveFraction = 1.0
    """See `fill`; a full step is prompts_per_step x group_size rollouts."""
    max_staleness: PositiveInt | None = 4
    """Policy versions after which a rollout leaves the buffer; null for never."""
    without_replacement: bool = True
    """Train on no rollout twice in a step; otherwise all are drawn with replacement, fresh ones among them."""
    resample_fresh: bool = False
    """Draw fresh rollouts by priority too, rather than train on each once; needs `without_replacement: false`."""
    old_logprobs: Literal["recorded", "recomputed"] = "recorded"
    """Denominator of a replayed rollout's importance ratio: the log-probabilities recorded when it was sampled, or
    those of the learner at the start of the step."""

    @model_validator(mode="after")
    def _check_options(self) -> ReplayConfig:
        if self.fill == "fraction" and self.target_fraction == 1.0:
            raise ValueError("`fill: fraction` with target_fraction 1 leaves nothing fresh; use a value below 1")
        if self.resample_fresh and self.without_replacement:
            raise ValueError(
                "`resample_fresh` draws with replacement, which `without_replacement` forbids; "
                "set `without_replacement: false`"
            )
        return self

    @model_validator(mode="after")
    def _check_preset(self) -> ReplayConfig:
        check_preset_applied(f"preset {self.preset!r}", REPLAY_PRESETS[self.preset], self.model_fields_set)
        return self

    def describe(self, rollouts_per_step: int) -> str:
        """Return what is replayed, a line a fact."""
        target = round(self.target_fraction * rollouts_per_step)
        capacity = self.capacity or target
        fill = f"up to {target} a step" if self.fill == "size" else f"{self.target_fraction:.0%} of what is trained on"
        age = "of any age"
        if self.max_staleness is not None:
            age = f"at most {pluralize(self.max_staleness, 'version')} of the policy old"
        probability = f"p ∝ |A_i|^{self.priority_exponent:g}"
        if self.positive_advantage_weight != 1.0:
            probability += f", times {self.positive_advantage_weight:g} where A_i > 0"
        repeats = "each at most once a step" if self.without_replacement else "with replacement"
        old = "as recorded when they were sampled" if self.old_logprobs == "recorded" else "computed by the learner"
        lines = [
            f"{fill}, from the last {capacity:,} rollouts with A_i ≠ 0, {age}",
            f"drawn with {probability}, {repeats}",
            f"their A_i stay; their π_old is {old}",
        ]
        if self.drop_zero_advantage:
            lines.append("rollouts with A_i = 0 are left out of L and of its denominators")
        if self.resample_fresh:
            lines.append(f"the step's own are drawn in the same way, at most {target}")
        return "\n".join(lines)
