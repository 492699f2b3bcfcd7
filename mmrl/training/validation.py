"""Held-out reward: one response to each sample under the current weights, scored without learning from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmrl.ports import PromptBuilder, RewardScorer, RolloutPipeline
from mmrl.scoring.answer_and_score import answer_and_score
from mmrl.types import EvalRewards, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Measures the reward of samples, in batches."""

    prompt_builder: PromptBuilder
    rollout_pipeline: RolloutPipeline
    """Generates one rollout for each prompt."""
    scorer: RewardScorer
    batch_size: int
    """Samples that are answered together; results do not depend on it."""
    warn: Callable[[str], None]
    """Receives a message for each reward term that failed."""

    def evaluate(self, samples: Sequence[Sample], *, step: int) -> EvalRewards:
        """Return the total reward of each sample, and the summed counts of the rollout pipeline."""
        rewards: dict[str, dict[str, float]] = {}
        metrics: Counter[str] = Counter()
        failures: Counter[tuple[str, str]] = Counter()
        for start in range(0, len(samples), self.batch_size):
            batch = samples[start : start + self.batch_size]
            answers = answer_and_score(
                batch, self.prompt_builder, self.rollout_pipeline, self.scorer, step=step, for_evaluation=True
            )
            metrics.update(answers.metrics)
            for group in answers.groups:
                sample = group.prompt.sample
                [score] = group.scores
                rewards.setdefault(sample.task, {})[sample.id] = score.total
                failures.update((term, failure.error_kind) for term, failure in score.failures.items())
        for (term, error_kind), count in failures.items():
            self.warn(
                f"evaluation: reward {term!r} failed on {count} of {len(samples)} ({error_kind}); its fallback counts"
            )
        return EvalRewards(rewards, metrics)
