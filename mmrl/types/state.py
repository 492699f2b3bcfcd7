"""The state of a run beside weights and optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mmrl.types.experience import Experience
from mmrl.types.reward import Group
from mmrl.types.rollout import Rollout, RolloutBatch


class SampleStats(NamedTuple):
    """How a sample fared when it was drawn: mean and standard deviation of a reward over its rollouts."""

    mean: float
    std: float


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """What a run remembers beyond weights and optimizer: exactly what a checkpoint adds to them.

    `step_start` is the position where the next step's samples begin. `history` has the visits of each sample by id;
    `phase` and what follows it is where a curriculum stands: the ends that were settled by a plateau, and the rewards
    of the steps since the phase began.
    `memory` is what may be replayed, oldest first; `carried` groups passed the filter and wait for the next step.
    `ahead` is the first round of the step to come, answered while the last one was learned.
    """

    stage_index: int = 0
    step: int = 0
    data_position: int = 0
    version: int = 0
    steps_without_signal: int = 0
    nonfinite_steps: int = 0
    stage_done: bool = False
    metrics_bytes: int = 0
    unfinished: tuple[tuple[Rollout, ...], ...] = ()
    prefetched: RolloutBatch | None = None
    eval_rewards: dict[str, dict[str, Any]] = field(default_factory=dict)
    step_data_start: int = 0
    reward_history: dict[str, list[SampleStats]] = field(default_factory=dict)
    phase: int = 0
    phase_ends: dict[int, int] = field(default_factory=dict)
    phase_rewards: list[float] = field(default_factory=list)
    replay_buffer: tuple[Experience, ...] = ()
    carried_over: tuple[Group, ...] = ()
