"""Replay: stored rollouts of earlier steps with a nonzero advantage fill up a step that has too few.

Rollouts are kept as references and tokens, without pixels. Before an old one is trained on, its prompt and the media
that tools showed are built again. If the pixels differ, its recorded log-probs belong to another input, so it is
dropped.

Source: VL-Rethinker (arXiv:2504.08837 v1, 3.2): rollouts with a nonzero advantage are kept and sampled with
p ∝ |A|^alpha. Departures: a rollout can be dropped for its staleness; none is trained on twice in a step unless the
options say so; each step derives its own seed, so a resumed run samples what an uninterrupted one would.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

import numpy as np

from mmrl.config.schema import ReplayConfig
from mmrl.types import Experience, Rollout, TrainingState
from mmrl.utils.seeds import derive_seed

ReplayBuffer = tuple[Experience, ...]
"""Rollouts with a nonzero advantage: the oldest policy version first, equally old ones in order of arrival."""

MediaDigests = tuple[str, ...]
"""`Rollout.media_digests`."""

ChangedMediaFinder = Callable[[Iterable[Rollout]], set[MediaDigests]]
"""Returns the `media_digests` of the rollouts whose media have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Replay options of one stage, with the numbers that they are relative to."""

    options: ReplayConfig  # the stage's `replay` section
    rollouts_per_step: int  # rollouts of a full step: prompts_per_step x group_size
    seed: tuple[str | int, ...]  # parts that the seed of every draw derives from: the run's seed and the stage's name

    @property
    def target_size(self) -> int:
        """Rollouts that a step is filled up to: `target_fraction` of a full step, at least 1."""
        return max(1, round(self.options.target_fraction * self.rollouts_per_step))

    @property
    def capacity(self) -> int:
        """Rollouts that the buffer holds."""
        return self.options.capacity or self.target_size


class ReplayResult(NamedTuple):
    """The experiences that a step trains on, and metrics of its replay."""

    current: Sequence[Experience]  # of the current step
    replayed: Sequence[Experience] = ()  # drawn from the buffer
    metrics: Mapping[str, float] = {}


def replay_experiences(
    current_experiences: Sequence[Experience],
    state: TrainingState,
    settings: ReplaySettings,
    find_changed_media: ChangedMediaFinder,
) -> ReplayResult:
    """Return the experiences of the current step to train on, and stored ones that fill up the step.

    The current step's experiences with a nonzero advantage enter `state.replay_buffer` before the draw from it. Drawn
    experiences whose media have changed leave it, and the draw is made again.
    """
    options = settings.options
    with_signal = [experience for experience in current_experiences if experience.has_signal]
    current = with_signal if options.drop_zero_advantage else current_experiences
    if options.resample_fresh:
        # Drawn with replacement, by the same weights as stored ones, instead of trained on once each.
        seed = derive_seed(*settings.seed, "replay", "own", state.step)
        count = min(settings.target_size, len(with_signal))
        current = draw_experiences(with_signal, count, seed, options, without_replacement=False)
    buffer = update_buffer(
        state.replay_buffer,
        with_signal,
        capacity=settings.capacity,
        version=state.version,
        max_staleness=options.max_staleness,
    )
    # By identity: a comparison by value would read every token.
    current_ids = set(map(id, with_signal))
    # Without replacement, no rollout of the current step is drawn: it is trained on already.
    excluded_ids = current_ids if options.without_replacement else set()
    seed = derive_seed(*settings.seed, "replay", "memory", state.step)
    count = settings.target_size - len(current)
    drawn, usable = draw_usable(buffer, excluded_ids, count, seed, options, find_changed_media)
    replayed = list(drawn)
    for index, experience in enumerate(drawn):
        # A rollout of the current step that is drawn again keeps its old log-probs: it has one importance ratio.
        if id(experience) not in current_ids:
            staleness = state.version - experience.rollout.oldest_version
            replayed[index] = replace(experience, staleness=staleness, old_logprobs_source=options.old_logprobs)
    state.replay_buffer = usable
    metrics = _replay_metrics([*current, *replayed], replayed, usable, options)
    metrics["replay/dropped_changed_media"] = float(len(buffer) - len(usable))
    return ReplayResult(current, replayed, metrics)


def draw_usable(
    buffer: ReplayBuffer,
    excluded_ids: Set[int],
    count: int,
    seed: int,
    options: ReplayConfig,
    find_changed_media: ChangedMediaFinder,
) -> tuple[list[Experience], ReplayBuffer]:
    """Draw stored experiences with unchanged media. Return them, and the buffer without those found changed.

    Experiences whose `id` is in `excluded_ids` are not drawn. Media are checked only for drawn experiences.
    """
    while True:
        candidates = [experience for experience in buffer if id(experience) not in excluded_ids]
        drawn = draw_experiences(candidates, count, seed, options, without_replacement=options.without_replacement)
        changed = find_changed_media(experience.rollout for experience in drawn)
        if not changed:
            return drawn, buffer
        # This drops at least one rollout, so the loop ends.
        buffer = tuple(experience for experience in buffer if experience.rollout.media_digests not in changed)


def update_buffer(
    buffer: ReplayBuffer, experiences: Sequence[Experience], *, capacity: int, version: int, max_staleness: int | None
) -> ReplayBuffer:
    """Add experiences to the buffer, and return the `capacity` youngest that are not too stale.

    `max_staleness` is the number of policy versions before `version` after which a rollout is dropped; None for never.
    """
    get_version = attrgetter("rollout.oldest_version")
    # Partial rollouts and groups carried over arrive in any order of age. Equally old ones stay in order of arrival.
    by_age = list(buffer)
    for experience in experiences:
        insort(by_age, experience, key=get_version)
    start = 0 if max_staleness is None else bisect_left(by_age, version - max_staleness, key=get_version)
    return tuple(by_age[start:][-capacity:])


def log_weights(experiences: Sequence[Experience], options: ReplayConfig) -> np.ndarray:
    """Return alpha log|A| of each experience, float64 [E]. If turns have their own advantages, |A| is their mean |A|.

    No A may be 0. The weights are logarithms because |A|^alpha can over- or underflow.
    """
    advantages = np.array([experience.mean_abs_advantage for experience in experiences], dtype=np.float64)
    return np.asarray(options.priority_exponent * np.log(advantages))


def draw_experiences(
    experiences: Sequence[Experience], count: int, seed: int, options: ReplayConfig, *, without_replacement: bool
) -> list[Experience]:
    """Sample `count` experiences with p ∝ |A|^alpha, as `sample_indices` does. No A may be 0."""
    weights = log_weights(experiences, options)
    indices = sample_indices(weights, count, seed, without_replacement=without_replacement)
    return [experiences[index] for index in indices]


def sample_indices(log_weights_E: np.ndarray, count: int, seed: int, *, without_replacement: bool) -> list[int]:
    """Sample `count` of E experiences in proportion to their weights, and return their indices in the order drawn.

    `log_weights_E` are logs of unnormalised weights, float64 [E]. With `without_replacement` each is drawn at most
    once, so there are fewer than `count` if E is smaller.

    Source: Gumbel-max trick for draws without replacement, the largest of log weight + Gumbel noise (Kool et al.,
    arXiv:1903.06059).
    """
    size = len(log_weights_E)
    if without_replacement:
        count = min(count, size)
    if count <= 0 or not size:
        return []
    # A separate generator for this draw, so a resumed run samples what an uninterrupted one would.
    generator = np.random.Generator(np.random.Philox(seed))
    if without_replacement:
        # A stable sort, so that ties fall the same way on every machine.
        order = np.argsort(-(log_weights_E + generator.gumbel(size=size)), kind="stable")
        return list(map(int, order[:count]))
    # The largest log weight is subtracted first: |A|^alpha itself can overflow for a large alpha.
    cumulative = np.cumsum(np.exp(log_weights_E - log_weights_E.max()))
    indices = np.searchsorted(cumulative / cumulative[-1], generator.random(count), side="right")
    return list(map(int, indices))


def effective_sample_size(log_weights_E: np.ndarray) -> float:
    """Return (sum w)^2 / sum w^2 of weights given as logs, float64 [E]; 0 where E is 0.

    This is Kish's effective sample size: the number of equally weighted rollouts that would be as diverse.
    """
    if not len(log_weights_E):
        return 0.0
    weights = np.exp(log_weights_E - log_weights_E.max())
    return float(weights.sum() ** 2 / (weights**2).sum())


def _replay_metrics(
    experiences: Sequence[Experience], replayed: Sequence[Experience], buffer: ReplayBuffer, options: ReplayConfig
) -> dict[str, float]:
    staleness = [experience.staleness for experience in replayed]
    # By value, not identity: a checkpoint stores equal rollouts once, so a resumed run has one object for them.
    distinct = set()
    for experience in experiences:
        rollout = experience.rollout
        tokens = tuple(segment.token_ids for segment in rollout.segments)
        distinct.add((rollout.prompt.sample.id, rollout.index, rollout.oldest_version, tokens))
    return {
        "replay/buffer_size": float(len(buffer)),
        "replay/effective_size": effective_sample_size(log_weights(buffer, options)),
        "replay/frac": len(replayed) / len(experiences) if experiences else 0.0,
        "replay/staleness_mean": fmean(staleness) if staleness else 0.0,
        "replay/staleness_max": float(max(staleness, default=0)),
        "replay/unique_frac": len(distinct) / len(experiences) if experiences else 1.0,
    }
