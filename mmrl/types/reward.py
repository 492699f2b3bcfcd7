"""Rewards of rollouts, and groups of scored rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from mmrl.types.rollout import Prompt, Rollout


class RewardValue(NamedTuple):
    """Result of one reward function for one response.

    Example: `RewardValue(0.0, "2, expected 3")`
    """

    value: float
    """Within the range that the reward declares."""
    reason: str
    """One line for a person who reads the rollout."""


class RewardErrorKind(StrEnum):
    """Kind of failure that left a reward without a value. It ends the metric `reward/<term>/<kind>`."""

    UNSCORABLE = "unscorable"  # it raised Unscorable
    TIMEOUT = "timeouts"  # it was stopped at its deadline
    CRASH = "crashes"  # its process died
    ERROR = "errors"  # it raised something else, or returned no number in its range


class RewardFailure(NamedTuple):
    """A reward that gave no value for a response.

    Example: `RewardFailure(RewardErrorKind.TIMEOUT, "stopped after 10 s")`
    """

    error_kind: RewardErrorKind
    reason: str
    """One line for a person who reads the rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Rewards of one rollout, by term and in total.

    Example: `Score(terms={"count": RewardValue(0.0, "2, expected 3")}, total=0.0)`
    """

    terms: Mapping[str, RewardValue]
    """Result of each reward term, by name, before weights and transforms."""
    total: float
    """The reward that advantages are computed from: the weighted sum of the terms."""
    failures: Mapping[str, RewardFailure] = field(default_factory=dict)
    """Terms that gave no value; in `terms` they hold their fallback."""


class EvalRewards(NamedTuple):
    """Rewards of an evaluation on held-out samples.

    Example: `EvalRewards(rewards={"count": {"count-7": 1.0}}, rollout_metrics={})`
    """

    rewards: Mapping[str, Mapping[str, float]]
    """Task → sample id → total reward."""
    rollout_metrics: Mapping[str, float]
    """Metrics of the rollout steps, by their full names."""


class Dropped(NamedTuple):
    """A rollout that was left out of its group because it could not be scored.

    Example: `Dropped(rollout, {"count": RewardFailure(RewardErrorKind.CRASH, "...")})`
    """

    rollout: Rollout
    failures: Mapping[str, RewardFailure]
    """Terms at fault, by name; empty if a sibling's failure dropped the whole group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A prompt with its scored rollouts.

    Example: `Group(prompt=prompt, rollouts=(a, b), scores=(score_of_a, score_of_b))`
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    """Rollouts that were scored; empty if none could be."""
    scores: tuple[Score, ...]
    """One for each of `rollouts`, in the same order."""
    dropped: tuple[Dropped, ...] = ()
    """Rollouts that could not be scored."""
    probes: Mapping[str, tuple[Score, ...]] = field(default_factory=dict)
    """Scores of rollouts that never train, by the name of the probe: the same question with its image hidden, say."""

    @property
    def all_rollouts(self) -> tuple[Rollout, ...]:
        """Every rollout of the prompt, scored ones first."""
        return (*self.rollouts, *(dropped.rollout for dropped in self.dropped))

    @property
    def failures(self) -> tuple[tuple[str, RewardFailure], ...]:
        """Every failure of a reward in this group, as pairs of term name and failure."""
        found: list[tuple[str, RewardFailure]] = []
        for score in self.scores:
            found += score.failures.items()
        for dropped in self.dropped:
            found += dropped.failures.items()
        return tuple(found)

    @property
    def totals(self) -> tuple[float, ...]:
        """Total reward of each rollout, in the order of `rollouts`."""
        return tuple(score.total for score in self.scores)
