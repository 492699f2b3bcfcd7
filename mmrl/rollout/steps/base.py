"""The interface of rollout steps, and the dependencies that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from mmrl.distributed.ranks import Ranks, SingleProcess
from mmrl.policy.processor import PromptProcessor
from mmrl.protocols import EvalScorer, Sampler
from mmrl.rollout.tools.executor import ToolRunner
from mmrl.types import Rollout, RolloutBatch, Sample, SamplingParams

Place = tuple[int, int]
"""Place of a rollout in a batch: index of its group, and position in the group."""


class RolloutStep(Protocol):
    """Changes the rollouts of one sampling round. Steps are called in the order of the config, probes last.

    A step may
      - extend a rollout. `sampler.extend` appends a segment by POLICY. Tokens that the policy did not sample belong in
        segments by FORCED or ENVIRONMENT, with log-probability 0.0 each, and are never trained;
      - cut tokens from the end of a rollout, before it is extended;
      - replace a rollout by a longer one of the same index, or add rollouts with indices that no sibling has;
      - give the sample of a group's prompt another target, which rewards then compare with;
      - put rollouts that are scored but never trained into `probes`, and counts into `metrics` (`add_metrics`).

    A step must not change tokens, log-probabilities, author or version of a segment that it keeps: the learner computes
    importance ratios from them. It must keep the number and the order of groups, one for each prompt. Random choices
    must derive from seed, step, sample id and rollout index, or a resumed run would differ. On several ranks, each rank
    calls the step with its own groups, of which there may be none.
    """

    def __call__(self, batch: RolloutBatch, *, step: int) -> RolloutBatch:
        """Return the batch as this step changes it; `step` counts the stage's steps from 0, and is 0 in evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """Dependencies that the steps of a pipeline share."""

    sampler: Sampler
    """Generates and extends responses with the current policy."""
    scorer: EvalScorer
    """Scores responses, for steps that depend on whether a response is correct."""
    processor: PromptProcessor
    """Builds prompts, tokenizes, and parses responses."""
    sampling_params: SamplingParams
    """The distribution of first responses, with their stop strings and length limit."""
    group_size: int
    """First responses to each prompt."""
    prompts_per_step: int
    """Prompts of a training step over all ranks; partial rollouts end a round once so many groups are complete."""
    seed: int
    """Root of every random choice of the steps."""
    tool_runner: ToolRunner
    """Starts the processes that call tools."""
    swap_samples: Sequence[Sample] = ()
    """Samples whose media a blind probe may show in place of a prompt's own."""
    ranks: Ranks = field(default_factory=SingleProcess)
    """All processes of the run. In an evaluation only this one, since each rank answers its own samples by itself."""
    custom_steps: Mapping[str, StepFactory] = field(default_factory=dict)
    """Makes each of the user's own steps, by the name of the step."""


StepFactory = Callable[[RolloutContext], RolloutStep]
"""Makes one of the user's own rollout steps."""


def with_rollouts(
    groups: Sequence[Sequence[Rollout]], rollouts: Mapping[Place, Rollout]
) -> tuple[tuple[Rollout, ...], ...]:
    """Return the groups with `rollouts` at their places."""
    replaced = list(map(list, groups))
    for (group_index, position), rollout in rollouts.items():
        replaced[group_index][position] = rollout
    return tuple(map(tuple, replaced))


def add_metrics(batch: RolloutBatch, metrics: Mapping[str, float]) -> RolloutBatch:
    """Return the batch with `metrics` added to its own. They must be counts, as rounds and ranks are summed."""
    counts = Counter(batch.metrics)
    counts.update(metrics)
    return replace(batch, metrics=counts)


def with_probe(batch: RolloutBatch, name: str, rollouts: Mapping[int, tuple[Rollout, ...]]) -> RolloutBatch:
    """Return the batch with rollouts of the probe `name` added, by the index of their group."""
    probes = list(batch.probes or ({},) * len(batch.groups))
    for group_index, group in rollouts.items():
        probes[group_index] = {**probes[group_index], name: group}
    return replace(batch, probes=tuple(probes))
