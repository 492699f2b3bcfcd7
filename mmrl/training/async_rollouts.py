"""Asynchronous rollouts: while the learner trains on one step, the first round of the next step is generated.

Source: Noukhovitch et al., "Asynchronous RLHF", arXiv:2410.18252. The round is complete before the sampler receives
new weights and before anything is saved. Its tokens therefore depend on the policy version and on seeds, not on thread
timing, and a checkpoint holds the whole round.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from mmrl.protocols import RolloutPipeline
from mmrl.types import Author, Prompt, RolloutBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingBatch:
    """The rollouts of a round that the background thread is generating."""

    future: Future[RolloutBatch]  # the rollouts of this rank
    prompts: Sequence[Prompt]  # prompts of this rank
    step: int  # step that will learn from the rollouts
    version: int  # policy version that generates them

    def wait(self) -> RolloutBatch:
        """Return the rollouts of this rank once they are complete. Re-raises an error of the thread, with a note.

        Raises:
            RuntimeError: a policy version other than `version` generated a token.
        """
        try:
            batch = self.future.result()
        except Exception as error:
            sample_ids = ", ".join(prompt.sample.id for prompt in self.prompts)
            error.add_note(
                f"while the rollouts of step {self.step + 1} were generated in advance, for samples {sample_ids}"
            )
            raise
        for group in batch.groups:
            for rollout in group:
                for segment in rollout.segments:
                    if segment.author is Author.POLICY and segment.version != self.version:
                        raise RuntimeError(
                            f"sample {rollout.prompt.sample.id}, rollout {rollout.index}: generated in advance by "
                            f"policy version {segment.version}, not by {self.version}"
                        )
        return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncRollouts:
    """Generates the next step's first round in a background thread.

    The thread works on this rank's prompts alone. Ranks exchange rollouts after it has finished, in the main thread,
    because collectives of two threads could meet in different orders on different ranks.
    """

    pipeline: RolloutPipeline
    executor: Executor  # runs one call at a time, in a thread

    def start(self, prompts: Sequence[Prompt], *, step: int, version: int) -> PendingBatch:
        """Start generating for `step` with policy `version`.

        Until the pending batch is complete, no other rollouts may be drawn and no sampler may sync.
        """
        future = self.executor.submit(self.pipeline.run, prompts, step=step)
        return PendingBatch(future=future, prompts=prompts, step=step, version=version)
