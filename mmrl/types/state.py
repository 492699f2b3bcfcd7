"""Experiences: rollouts with advantages, which the learner trains on; and the state of a run beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from mmrl.types.rollout import Group, Rollout, RolloutBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A rollout to train on.

    `old_logprobs_source` says which log-probs the importance ratio divides by; None leaves it to `loss.old_logprobs`.
    `TokenTable.old_is_recorded_N` in `mmrl/learner/tokens.py` explains them.
    """

    rollout: Rollout  # the prompt, and tokens with the log-probs that they were sampled with
    advantage: float  # factor of the policy loss on the rollout's POLICY tokens; 0 in supervised training
    turn_advantages: tuple[float, ...] | None = None  # of each turn, if turns differ; `advantage` is then their mean
    staleness: int = 0  # policy versions since its oldest token was sampled; 0 for a rollout of the current policy
    old_logprobs_source: Literal["recorded", "recomputed"] | None = None  # see above

    @property
    def advantages(self) -> tuple[float, ...]:
        """Advantages of the turns, or the rollout's single one if its turns share it."""
        return self.turn_advantages or (self.advantage,)

    @property
    def mean_abs_advantage(self) -> float:
        """Mean |advantage| over the turns."""
        return sum(map(abs, self.advantages)) / len(self.advantages)

    @property
    def has_signal(self) -> bool:
        """True if an advantage is not 0: a policy loss that is proportional to it learns from the rollout."""
        return any(self.advantages)


class TokenValues(NamedTuple):
    """Values that the learner computed for the POLICY tokens of one rollout, one for each token, in order."""

    logprobs: tuple[float, ...]  # log-prob under the policy in the last epoch of the step, before its update, nats
    ratios: tuple[float, ...]  # importance ratio, before it is clipped
    entropies: tuple[float, ...]  # entropy of the next-token distribution, nats
    advantages: tuple[float, ...]  # advantage of the token, less the KL penalty where that is part of the reward
    clipped: tuple[float, ...]  # 1 if the lower bound changed its loss, 2 if the upper bound did, else 0


class WorstToken(float):
    """A metric whose value comes from a single token: an ordinary float that also names the token's rollout."""

    owner: str = ""  # the token's rollout, in words


class GroupSelection(NamedTuple):
    """The decision of selection about one group."""

    status: Literal["trained", "rejected", "no_room"]  # by dynamic sampling; no room: the step had enough groups
    reason: str | None = None  # why it was rejected: `unscored`, `truncated` or a reward term
    carried_over: bool = False  # True if an earlier step sampled it and had no room for it


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedExperiences:
    """Result of selection: this step's groups, and what the step trains on."""

    # For metrics and rollout files: first the groups carried over from earlier steps, then those of this step. A group
    # that is carried over to the next step is missing.
    groups: tuple[Group, ...]
    # A row for each of `groups`: an experience for each scored rollout, with an advantage of 0 if it is not trained on.
    experiences_by_group: tuple[tuple[Experience, ...], ...]
    experiences: tuple[Experience, ...]  # for the learner: replayed and carried-over ones too, no filtered ones
    selections: tuple[GroupSelection, ...] = ()  # one for each of `groups`; empty in supervised training
    replayed: tuple[Experience, ...] = ()  # the part of `experiences` that was drawn from the replay buffer
    has_signal: bool  # True if a rollout that may train and was not replayed has a nonzero advantage
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the selection, by their full names: `replay/frac`

    @property
    def advantages(self) -> tuple[tuple[float, ...], ...]:
        """A row for each of `groups`, with the advantage of each scored rollout: the mean of its turns'."""
        return tuple(tuple(map(attrgetter("advantage"), row)) for row in self.experiences_by_group)


class SampleStats(NamedTuple):
    """Rewards of a sample's group at one visit, a step that drew the sample."""

    mean: float  # mean reward over the group's rollouts
    std: float  # population standard deviation over them, at least 0


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """Everything that a run continues from, beside weights, optimizer and random generators; part of every checkpoint.

    The loop changes it in place. Fields are reset at the start of a stage unless they say otherwise.
    """

    stage_index: int = 0  # current stage among the config's, from 0; one past the last when all are done; not reset
    step: int = 0  # finished steps of the stage
    data_position: int = 0  # position in the stage's data order of the next sample to take
    version: int = 0  # policy version: steps since the run began, over all stages; not reset
    steps_without_signal: int = 0  # steps in a row, up to now, without `SelectedExperiences.has_signal`
    nonfinite_steps: int = 0  # steps in a row, up to now, whose gradient was not finite
    stage_done: bool = False  # True once the stage has reached its goal before its last step
    metrics_bytes: int = 0  # length of metrics.jsonl at the last checkpoint, bytes; a resumed run cuts the file there
    unfinished: tuple[tuple[Rollout, ...], ...] = ()  # groups of partial rollouts that the next round continues with
    next_batch: RolloutBatch | None = None  # with async rollouts, the rollouts of the next step's first round
    # Total rewards on the test samples: `before` or `after` training → task → sample id. Not reset.
    eval_rewards: dict[str, dict[str, Any]] = field(default_factory=dict)
    step_data_start: int = 0  # data position at which the next step's samples begin; set by RL stages
    # Where `DistinctOrder` has moved samples, so that no step takes one twice: data position → position in the order.
    moved_samples: dict[int, int] = field(default_factory=dict)
    # Sample id → rewards at each visit, oldest first; empty unless rewards are tracked.
    reward_history: dict[str, list[SampleStats]] = field(default_factory=dict)
    phase: int = 0  # index of the curriculum's current phase, from 0
    phase_ends: dict[int, int] = field(default_factory=dict)  # phase index → data position where a plateau ended it
    phase_rewards: list[float] = field(default_factory=list)  # mean reward of each step since the phase began
    # Mean tracked reward of each step since the KL reference was last reset; empty unless rewards are tracked.
    reset_rewards: list[float] = field(default_factory=list)
    callback_values: dict[str, Any] = field(default_factory=dict)  # of your callbacks, by names like `my/best`
    replay_buffer: tuple[Experience, ...] = ()  # rollouts with a nonzero advantage that may be replayed, oldest first
    carried_over: tuple[Group, ...] = ()  # scored groups that wait for room in a later step, the first to arrive first
