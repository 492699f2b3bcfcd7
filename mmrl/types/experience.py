"""Experiences: rollouts with advantages, which the learner trains on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mmrl.types.reward import Group
from mmrl.types.rollout import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A rollout to train on.

    Example: `Experience(rollout=..., advantage=-0.7)`
    """

    rollout: Rollout
    """The prompt, and tokens with the log-probs that they were sampled with."""
    advantage: float
    """Factor of the policy loss on the rollout's POLICY tokens; 0 in supervised training."""
    staleness: int = 0
    """Policy versions since the oldest of its tokens was sampled; 0 for a rollout of the current policy."""
    old_logprobs_source: Literal["recorded", "recomputed"] | None = None
    """Whose log-probs the importance ratio uses: those recorded in sampling, or the learner's at the step's start.

    None for what `loss.old_logprobs` says. `_LossTokens` in `mmrl/learner/objective.py` lists all settings that decide.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedExperiences:
    """Result of selection: this step's groups, and what the step trains on.

    Example: `SelectedExperiences(groups=(group,), advantages=((-0.7, 0.7),), experiences=(..., ...))`
    """

    groups: tuple[Group, ...]
    """All groups that the step scored, for metrics and rollout files."""
    advantages: tuple[tuple[float, ...], ...]
    """One row for each of `groups`, one value for each rollout; 0 for groups that are not trained on."""
    experiences: tuple[Experience, ...]
    """What the learner gets. It leaves out filtered rollouts, and adds carried over and replayed ones."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the selection, by their full names, e.g. `replay/frac`."""
