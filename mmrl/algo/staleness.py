"""The age of a rollout, in policy versions, and whose log-probs its importance ratio is computed from.

A rollout that an older policy sampled is learned from off-policy. With old log-probs `recorded`, its ratio is
pi / pi_sampling, clipped. With `loss.rollout_correction`, the ratio is taken from the learner's own log-probs at the
start of the step, and the correction weight also covers the versions in between: the decoupled objective of Hilton et
al. (arXiv:2110.00641), which AReaL uses (arXiv:2505.24298).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Literal

from mmrl.types import Author, Experience, Rollout

OldLogprobs = Literal["recorded", "recomputed"]


def compute_staleness(rollout: Rollout, version: int) -> int:
    """Return how many policy versions lie between the rollout's oldest sampled token and policy `version`."""
    return version - min(segment.version for segment in rollout.segments if segment.author is Author.POLICY)


def with_staleness(experience: Experience, version: int, old_logprobs: OldLogprobs | None) -> Experience:
    """Return the experience with its staleness at policy `version`.

    A stale one also records whose log-probs its ratio uses, None for what `loss.old_logprobs` says. A fresh one comes
    back unchanged: `loss.old_logprobs` alone decides about it.
    """
    staleness = compute_staleness(experience.rollout, version)
    if staleness == 0:
        return experience
    return replace(experience, staleness=staleness, old_logprobs_source=old_logprobs)


def staleness_metrics(experiences: Sequence[Experience]) -> dict[str, float]:
    """Return mean and maximum staleness of a step's rollouts, in policy versions; nothing for a step without any."""
    if not experiences:
        return {}
    values = [experience.staleness for experience in experiences]
    return {"rollout/staleness_mean": fmean(values), "rollout/staleness_max": float(max(values))}
