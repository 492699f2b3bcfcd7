"""Ask, answer and judge without learning: the held-out reward of a policy, by task, with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmrl.ports import PromptBuilder, RewardScorer, RolloutPipeline
from mmrl.types import EvalRewards, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """One response to each sample, in batches. `warn` is told of responses that a reward could not judge."""

    prompt_builder: PromptBuilder
    rollout_pipeline: RolloutPipeline
    scorer: RewardScorer
    batch_size: int
    warn: Callable[[str], None]

    def evaluate(self, samples: Sequence[Sample], *, step: int) -> EvalRewards:
        """Total reward of each sample, and the program's counts."""
        rewards: dict[str, dict[str, float]] = {}
        counts: Counter[str] = Counter()
        failed: Counter[tuple[str, str]] = Counter()
        for start in range(0, len(samples), self.batch_size):
            prompts = [self.prompt_builder.build(sample) for sample in samples[start : start + self.batch_size]]
            answers = self.rollout_pipeline.run(prompts, step=step)
            counts.update(answers.metrics)
            rollouts = [rollout for (rollout,) in answers.groups]
            for rollout, score in zip(rollouts, self.scorer.score_eval(rollouts), strict=True):
                sample = rollout.prompt.sample
                rewards.setdefault(sample.task, {})[sample.id] = score.total
                failed.update((name, failure.error_kind) for name, failure in score.failures.items())
        for (name, fault), count in failed.items():
            self.warn(f"evaluation: reward {name!r} failed on {count} of {len(samples)} ({fault}); its fallback counts")
        return EvalRewards(rewards, counts)
