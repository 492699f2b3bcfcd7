"""Ask, answer and judge without learning: the held-out reward of a policy, by task, with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmrl.ports import Asker, Judge, Program
from mmrl.types import HeldOut, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """One response to each sample, in batches. `warn` is told of responses that a reward could not judge."""

    asker: Asker
    program: Program
    judge: Judge
    batch_size: int
    warn: Callable[[str], None]

    def measure(self, samples: Sequence[Sample], *, step: int) -> HeldOut:
        """Total reward of each sample, and the program's counts."""
        rewards: dict[str, dict[str, float]] = {}
        counts: Counter[str] = Counter()
        failed: Counter[tuple[str, str]] = Counter()
        for start in range(0, len(samples), self.batch_size):
            prompts = [self.asker.ask(sample) for sample in samples[start : start + self.batch_size]]
            answers = self.program.answer(prompts, step=step)
            counts.update(answers.metrics)
            rollouts = [rollout for (rollout,) in answers.groups]
            for rollout, score in zip(rollouts, self.judge.evaluate(rollouts), strict=True):
                sample = rollout.prompt.sample
                rewards.setdefault(sample.task, {})[sample.id] = score.total
                failed.update((name, failure.fault) for name, failure in score.failures.items())
        for (name, fault), count in failed.items():
            self.warn(f"evaluation: reward {name!r} failed on {count} of {len(samples)} ({fault}); its fallback counts")
        return HeldOut(rewards, counts)
