"""Scores of rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from mmrl.types.rollout import Prompt, Rollout


class Term(NamedTuple):
    """What one reward says: a value in its declared range and one line a person can read."""

    value: float
    reason: str


class Fault(StrEnum):
    """Why a reward gave no value; the value names the metric `reward/<term>/<fault>`."""

    UNSCORABLE = "unscorable"  # it said so
    TIMEOUT = "timeouts"  # it was stopped at its deadline
    DEATH = "deaths"  # its process died
    ERROR = "errors"  # it raised something else, or returned no number in its range


class Failure(NamedTuple):
    """A reward that gave no value for a response."""

    fault: Fault
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Named reward terms, as the rewards gave them, and the total; a term in `failures` holds its fallback."""

    terms: Mapping[str, Term]
    total: float
    failures: Mapping[str, Failure] = field(default_factory=dict)


class HeldOut(NamedTuple):
    """What held-out samples earned, task → sample id → total reward, and what the rollout program counted."""

    rewards: Mapping[str, Mapping[str, float]]
    counts: Mapping[str, float]


class Skip(NamedTuple):
    """A rollout left out of its group, and the terms at fault; none when a sibling's failure took it along."""

    rollout: Rollout
    failures: Mapping[str, Failure]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One prompt, its judged rollouts and their scores, in the same order, and those that could not be judged.

    `probes` are the scores of rollouts that never train, by what was done to their prompt (a picture left out, say).
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]
    skipped: tuple[Skip, ...] = ()
    probes: Mapping[str, tuple[Score, ...]] = field(default_factory=dict)

    @property
    def drawn(self) -> tuple[Rollout, ...]:
        """Every rollout of the prompt, judged or not."""
        return (*self.rollouts, *(skip.rollout for skip in self.skipped))

    @property
    def failures(self) -> tuple[tuple[str, Failure], ...]:
        """Every failed call, by the name of its term."""
        failures = (*(score.failures for score in self.scores), *(skip.failures for skip in self.skipped))
        return tuple(failed for of_one in failures for failed in of_one.items())

    @property
    def totals(self) -> tuple[float, ...]:
        """Total reward of each rollout."""
        return tuple(score.total for score in self.scores)
