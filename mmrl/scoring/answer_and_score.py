"""Answer samples with the current policy and score the answers, in `sample` stages, validation and evaluation.

The training loop in `mmrl.training.rl` makes the same calls one by one, because it measures the time of each and may
make the first two in another thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmrl.ports import PromptBuilder, RewardScorer, RolloutPipeline
from mmrl.types import Group, Rollout, RolloutBatch, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswers:
    """The scored rollouts of some samples."""

    groups: Sequence[Group]  # one group for each sample, in order
    metrics: Mapping[str, float]  # counts of the rollout pipeline, such as `rethink/attempted`


def answer_samples(
    samples: Sequence[Sample], prompt_builder: PromptBuilder, rollout_pipeline: RolloutPipeline, *, step: int
) -> RolloutBatch:
    """Build a prompt for each sample and generate its group of rollouts; random choices derive from `step`."""
    return rollout_pipeline.run(list(map(prompt_builder.build, samples)), step=step)


def answer_and_score(
    samples: Sequence[Sample],
    prompt_builder: PromptBuilder,
    rollout_pipeline: RolloutPipeline,
    scorer: RewardScorer,
    *,
    step: int,
    for_evaluation: bool = False,
) -> ScoredAnswers:
    """Answer each sample and score the rollouts.

    In training, rewards have the weights of `step`, and a rollout that cannot be scored moves to `Group.dropped`. For
    evaluation, terms that only shape training are left out and no rollout is dropped.
    """
    batch = answer_samples(samples, prompt_builder, rollout_pipeline, step=step)
    if not for_evaluation:
        return ScoredAnswers(groups=scorer.score_groups(batch.groups, step=step), metrics=batch.metrics)
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
