"""A rollout engine of your own: transformers in small batches, with a log of its speed.

rollout: {engine: {fn: ./rollout_engine.py:make_engine, args: {max_batch_tokens: 4096}}}
"""

import time
from collections.abc import Sequence

from mmrl import EngineContext, GeneratedTokens, GenerationRequest, HfEngine, SamplingParams


class LoggedEngine(HfEngine):
    """Generates with the learner's model and appends "new tokens,seconds" to a file."""

    def __init__(self, context: EngineContext, max_batch_tokens: int) -> None:
        copy = context.concurrent  # the learner changes its weights while this engine generates
        super().__init__(context.policy, context.processor, max_batch_tokens=max_batch_tokens, copy_policy=copy)
        context.work_dir.mkdir(parents=True, exist_ok=True)
        self.log = context.work_dir / "speed.csv"

    def generate(
        self, requests: Sequence[GenerationRequest], sampling_params: SamplingParams, *, record_routes: bool = False
    ) -> list[list[GeneratedTokens]]:
        """Continue each request, and log how long that took."""
        start = time.perf_counter()
        continuations = super().generate(requests, sampling_params, record_routes=record_routes)
        num_tokens = sum(len(generated.token_ids) for siblings in continuations for generated in siblings)
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"{num_tokens},{time.perf_counter() - start:.3f}\n")
        return continuations


def make_engine(context: EngineContext, *, max_batch_tokens: int = 2**16) -> LoggedEngine:
    """Make the engine; mmrl calls this once in a run, on every rank."""
    return LoggedEngine(context, max_batch_tokens)
