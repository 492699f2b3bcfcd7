"""Scores of rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from mmrl.types.rollout import Prompt, Rollout


class RewardValue(NamedTuple):
    """What one reward says: a value in its declared range and one line a person can read."""

    value: float
    reason: str


class RewardErrorKind(StrEnum):
    """Why a reward gave no value; the value names the metric `reward/<term>/<fault>`."""

    UNSCORABLE = "unscorable"  # it said so
    TIMEOUT = "timeouts"  # it was stopped at its deadline
    CRASH = "crashes"  # its process died
    ERROR = "errors"  # it raised something else, or returned no number in its range


class RewardFailure(NamedTuple):
    """A reward that gave no value for a response."""

    error_kind: RewardErrorKind
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Named reward terms, as the rewards gave them, and the total; a term in `failures` holds its fallback."""

    terms: Mapping[str, RewardValue]
    total: float
    failures: Mapping[str, RewardFailure] = field(default_factory=dict)


class EvalRewards(NamedTuple):
    """What held-out samples earned, task → sample id → total reward, and what the rollout program counted."""

    rewards: Mapping[str, Mapping[str, float]]
    rollout_metrics: Mapping[str, float]


class Dropped(NamedTuple):
    """A rollout left out of its group, and the terms at fault; none when a sibling's failure took it along."""

    rollout: Rollout
    failures: Mapping[str, RewardFailure]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One prompt, its judged rollouts and their scores, in the same order, and those that could not be judged.

    `probes` are the scores of rollouts that never train, by what was done to their prompt (a picture left out, say).
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]
    dropped: tuple[Dropped, ...] = ()
    probes: Mapping[str, tuple[Score, ...]] = field(default_factory=dict)

    @property
    def all_rollouts(self) -> tuple[Rollout, ...]:
        """Every rollout of the prompt, judged or not."""
        return (*self.rollouts, *(skip.rollout for skip in self.dropped))

    @property
    def failures(self) -> tuple[tuple[str, RewardFailure], ...]:
        """Every failed call, by the name of its term."""
        failures = (*(score.failures for score in self.scores), *(skip.failures for skip in self.dropped))
        return tuple(failed for of_one in failures for failed in of_one.items())

    @property
    def totals(self) -> tuple[float, ...]:
        """Total reward of each rollout."""
        return tuple(score.total for score in self.scores)
