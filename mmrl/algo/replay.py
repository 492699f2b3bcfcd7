"""Selective sample replay: what is remembered, and what of it is drawn.

Source: VL-Rethinker (arXiv:2504.08837 v1, 3.2): rollouts with an advantage stay, and are drawn with p ∝ |A|^alpha.
Departures: rollouts have an age in policy versions and may be forgotten by it; nothing is learned twice in a step
unless asked; what is drawn depends on a seed for each step, never on a generator that runs on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import isfinite

import numpy as np

from mmrl.config.schema import ReplayConfig
from mmrl.types import Author, Experience, Rollout

ReplayBuffer = tuple[Experience, ...]
"""Rollouts with an advantage, oldest first."""


def compute_staleness(rollout: Rollout, version: int) -> int:
    """How many policy versions before `version` the oldest of a rollout's tokens were sampled."""
    return version - min(segment.version for segment in rollout.segments if segment.author is Author.POLICY)


def check_finite_advantages(experiences: Iterable[Experience]) -> None:
    """Neither a weight nor a gradient can be made of an advantage that is not finite.

    Raises:
        ValueError: there is one; it names the sample.
    """
    for experience in experiences:
        if not isfinite(experience.advantage):
            rollout = experience.rollout
            raise ValueError(
                f"sample {rollout.prompt.sample.id}, rollout {rollout.index}: advantage {experience.advantage} is not "
                "finite"
            )


def update_buffer(
    buffer: ReplayBuffer, fresh: Sequence[Experience], *, capacity: int, version: int, max_staleness: int | None
) -> ReplayBuffer:
    """The memory with fresh rollouts behind it, at most `capacity`, none older than `max_age` at policy `version`."""
    start = (
        0
        if max_staleness is None
        else bisect_left(buffer, -max_staleness, key=lambda e: -compute_staleness(e.rollout, version))
    )
    return (*buffer[start:], *fresh)[-capacity:]


def log_weights(experiences: Sequence[Experience], options: ReplayConfig) -> np.ndarray:
    """log(|A|^alpha), plus log(positives_boost) where A > 0; float64 [E], one for each experience; A is never 0."""
    advantages = np.array([experience.advantage for experience in experiences], dtype=np.float64)
    boost = np.where(advantages > 0.0, np.log(options.positive_advantage_weight), 0.0)
    return np.asarray(options.priority_exponent * np.log(np.abs(advantages)) + boost)


def sample_indices(log_weights_E: np.ndarray, count: int, seed: int, *, without_replacement: bool) -> list[int]:
    """Indices of `count` of E experiences by weight: one after the other, each at most once and fewer where there are
    fewer; or with replacement, where not `unique`.

    Without replacement by the Gumbel-max trick: the largest of log weight + Gumbel noise (Kool et al.,
    arXiv:1903.06059).
    """
    size = len(log_weights_E)
    count = min(count, size) if without_replacement else count
    if count <= 0 or not size:
        return []
    generator = np.random.Generator(np.random.Philox(seed))
    if without_replacement:
        order = np.argsort(-(log_weights_E + generator.gumbel(size=size)), kind="stable")
        return [int(index) for index in order[:count]]
    cumulative = np.cumsum(np.exp(log_weights_E - log_weights_E.max()))
    indices = np.searchsorted(cumulative / cumulative[-1], generator.random(count), side="right")
    return [int(index) for index in indices]


def effective_sample_size(log_weights_E: np.ndarray) -> float:
    """(Σ w)² / Σ w²: of how many equally likely ones the draw is worth; 0 where there are none."""
    if not len(log_weights_E):
        return 0.0
    weights = np.exp(log_weights_E - log_weights_E.max())
    return float(weights.sum() ** 2 / (weights**2).sum())
