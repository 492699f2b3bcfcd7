"""Answer samples with the current policy, in `sample` stages and benchmarks; and score the answers, in validation.

The training loop in `mmrl.training.rl` makes the same calls one by one, because it measures the time of each and may
make the first two in another thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmrl.protocols import EvalScorer, Processor, RolloutPipeline
from mmrl.types import Group, Rollout, RolloutBatch, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswers:
    """The scored rollouts of some samples."""

    groups: Sequence[Group]  # one group for each sample, in order
    metrics: Mapping[str, float]  # counts of the rollout pipeline, such as `rethink/attempted`


def answer_samples(
    samples: Sequence[Sample], processor: Processor, rollout_pipeline: RolloutPipeline, *, step: int
) -> RolloutBatch:
    """Build a prompt for each sample and generate its group of rollouts; random choices derive from `step`."""
    return rollout_pipeline.run(list(map(processor.build, samples)), step=step)


def answer_and_score(
    samples: Sequence[Sample],
    processor: Processor,
    rollout_pipeline: RolloutPipeline,
    scorer: EvalScorer,
    *,
    step: int,
) -> ScoredAnswers:
    """Answer each held-out sample and score the rollouts, without the terms that only shape training."""
    batch = answer_samples(samples, processor, rollout_pipeline, step=step)
    all_rollouts: list[Rollout] = []
    for rollouts in batch.groups:
        all_rollouts += rollouts
    # One call for all of them: rewards with worker processes score in parallel.
    scores = iter(scorer.score_eval(all_rollouts))
    groups = []
    for rollouts in batch.groups:
        group_scores = tuple(next(scores) for _ in rollouts)
        groups.append(Group(prompt=rollouts[0].prompt, rollouts=rollouts, scores=group_scores))
    return ScoredAnswers(groups=groups, metrics=batch.metrics)
