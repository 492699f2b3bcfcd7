"""A rollout engine of your own: transformers in small batches, with a log of its speed.

rollout: {engine: {fn: ./rollout_engine.py:make_engine, args: {max_batch_tokens: 4096}}}
"""

import time
from collections.abc import Sequence

from mmrl import EngineContext, HfSampler, Rollout, SamplingParams


class LoggedSampler(HfSampler):
    """Samples with the learner's model and appends "step,new tokens,seconds" to a file."""

    def __init__(self, context: EngineContext, max_batch_tokens: int) -> None:
        super().__init__(
            context.policy,
            context.processor,
            salt=context.salt,
            version=context.version,
            max_batch_tokens=max_batch_tokens,
            copy_policy=context.concurrent,
            record_routes=context.record_routes,
        )
        context.work_dir.mkdir(parents=True, exist_ok=True)
        self.log = context.work_dir / "speed.csv"

    def extend(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams, *, step: int) -> list[Rollout]:
        """Sample further tokens; `generate` calls this with empty rollouts."""
        start = time.perf_counter()
        extended = super().extend(rollouts, sampling_params, step=step)
        num_tokens = sum(rollout.num_tokens for rollout in extended) - sum(rollout.num_tokens for rollout in rollouts)
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"{step},{num_tokens},{time.perf_counter() - start:.3f}\n")
        return extended


def make_engine(context: EngineContext, *, max_batch_tokens: int = 2**16) -> LoggedSampler:
    """Make a sampler; mmrl calls this for each stage that samples, and for the evaluation."""
    return LoggedSampler(context, max_batch_tokens)
