"""Selective sample replay: which rollouts of earlier steps are learned again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmrl.config.schema.base import PositiveInt, StrictModel
from mmrl.config.schema.presets import PresetSettings, check_preset_applied

ReplayPreset = Literal["default", "paper", "code"]

REPLAY_PRESETS: Mapping[ReplayPreset, PresetSettings] = {
    # Few steps old at most, nothing twice: the schema's own defaults.
    "default": {},
    # VL-Rethinker, arXiv:2504.08837 v1, 3.2: what had an advantage stays for the whole episode, here the stage, and
    # fills up the step by |A|^alpha. The paper sets no bound; this one is the memory of a machine.
    "paper": {"capacity": 65536, "max_staleness": None, "without_replacement": False},
    # Its repository where replay runs (commit 4afedcd): half a step, drawn by |A| with replacement from the fresh
    # rollouts, filled up from a memory of that size. Its extra positives have weight 0 there: they are never drawn.
    "code": {
        "capacity": None,
        "max_staleness": None,
        "without_replacement": False,
        "resample_fresh": True,
        "target_fraction": 0.5,
    },
}


class ReplayConfig(StrictModel):
    """Selective sample replay (VL-Rethinker, arXiv:2504.08837): rollouts without advantage make room for those of
    earlier steps that had one, drawn with p ∝ |A|^alpha. An advantage stays what it was among its own siblings.
    """

    preset: ReplayPreset = "default"
    """A published behaviour: other defaults for what follows, which may still be set one by one."""
    drop_zero_advantage: bool = True
    """Leave out rollouts without advantage, here and in what the loss divides by."""
    capacity: PositiveInt | None = 1024
    """Rollouts remembered, the oldest leaving first; null for as many as `share` of a step."""
    priority_exponent: Annotated[float, Field(ge=0.0)] = 1.0
    """Large advantages come more often by this power; 0 draws uniformly."""
    positive_advantage_weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Weight of rollouts that did better than their siblings, on top."""
    fill: Literal["size", "fraction"] = "size"
    """Replay as many as are missing from `share` of a full step; or as many as make up `share` of what is learned."""
    target_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """See `refill`; a full step is prompts_per_step x group_size rollouts."""
    max_staleness: PositiveInt | None = 4
    """Policy versions after which a rollout is forgotten; null for never."""
    without_replacement: bool = True
    """Learn no rollout twice in a step; otherwise all are drawn with replacement, the step's own among them."""
    resample_fresh: bool = False
    """Draw the step's own rollouts in the same way too, rather than learn each once; needs `unique: false`."""
    old_logprobs: Literal["recorded", "recomputed"] = "recorded"
    """Whose probabilities stand below the ratio of a replayed rollout: those recorded when it was sampled, clipped; or
    the learner's at the step's start."""

    @model_validator(mode="after")
    def _check_options(self) -> ReplayConfig:
        if self.fill == "fraction" and self.target_fraction == 1.0:
            raise ValueError("`refill: fraction` with share 1 leaves nothing fresh; use a share below 1")
        if self.resample_fresh and self.without_replacement:
            raise ValueError("`resample` draws with replacement, which `unique` forbids; set `unique: false`")
        return self

    @model_validator(mode="after")
    def _check_preset(self) -> ReplayConfig:
        check_preset_applied(f"preset {self.preset!r}", REPLAY_PRESETS[self.preset], self.model_fields_set)
        return self
