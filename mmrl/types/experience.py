"""What the learner trains on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mmrl.types.reward import Group
from mmrl.types.rollout import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A rollout with what it teaches. `advantage` scales the policy term of its POLICY tokens.

    `age` is how many policy versions ago it was sampled, 0 where it is fresh. `old`, where set, is whose probabilities
    stand below the ratio, whatever the loss says of fresh ones.
    """

    rollout: Rollout
    advantage: float
    staleness: int = 0
    old_logprobs_source: Literal["recorded", "recomputed"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedExperiences:
    """What a step learns from: the groups that count, their advantages, the experiences made of them and of others
    remembered, and numbers to tell.
    """

    groups: tuple[Group, ...]
    advantages: tuple[tuple[float, ...], ...]
    experiences: tuple[Experience, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
