"""The state of a run, beside its weights and optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mmrl.types.experience import Experience
from mmrl.types.reward import Group
from mmrl.types.rollout import Rollout, RolloutBatch


class SampleStats(NamedTuple):
    """Rewards of a sample's group at one visit.

    Example: `SampleStats(mean=0.25, std=0.43)`
    """

    mean: float
    """Mean reward over the group's rollouts."""
    std: float
    """Population standard deviation over them."""


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """Everything that a run goes on from, beside weights, optimizer and random generators; part of every checkpoint.

    The loop changes it in place. Fields are reset at the start of a stage unless they say otherwise.

    Example: `TrainingState(stage_index=1, step=40, data_position=640, version=90)`
    """

    stage_index: int = 0
    """Index of the current stage among the config's stages; one past the last when all are done."""
    step: int = 0
    """Finished steps of the stage."""
    data_position: int = 0
    """Position in the stage's data order of the next sample to take."""
    version: int = 0
    """Policy version: steps since the run began, over all stages."""
    steps_without_signal: int = 0
    """Steps in a row, up to now, in which no rollout had an advantage."""
    nonfinite_steps: int = 0
    """Steps in a row, up to now, whose gradient was not finite."""
    stage_done: bool = False
    """True once the stage has reached its goal before its last step."""
    metrics_bytes: int = 0
    """Length of metrics.jsonl at this moment; a resumed run cuts the file there."""
    unfinished: tuple[tuple[Rollout, ...], ...] = ()
    """Groups of partial rollouts that the next step goes on with."""
    prefetched: RolloutBatch | None = None
    """First round of the next step, sampled while the last step was learned; None without async rollouts."""
    eval_rewards: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Total rewards on the test samples: `before` or `after` training → task → sample id; kept over stages."""
    step_data_start: int = 0
    """Data position at which the samples of the next step begin; set where rewards are tracked."""
    reward_history: dict[str, list[SampleStats]] = field(default_factory=dict)
    """Sample id → rewards at each visit, oldest first; empty unless rewards are tracked."""
    phase: int = 0
    """Index of the curriculum's current phase."""
    phase_ends: dict[int, int] = field(default_factory=dict)
    """Phase index → data position at which a plateau ended the phase."""
    phase_rewards: list[float] = field(default_factory=list)
    """Mean reward of each step since the phase began."""
    replay_buffer: tuple[Experience, ...] = ()
    """Rollouts with an advantage that may be replayed, oldest first."""
    carried_over: tuple[Group, ...] = ()
    """Groups that passed dynamic sampling and wait for room in the next step."""
