"""One step off-policy: the first round of a step is answered while the step before it is learned.

Source: Noukhovitch et al., "Asynchronous RLHF", arXiv:2410.18252. What is drawn ahead is complete before the
sampler gets new weights and before anything is saved: so it depends on the policy's version and on seeds, never on
which of the two is done first, and a checkpoint holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Final

from mmrl.distributed.ranks import SharedRolloutPipeline, rank_slice
from mmrl.types import Author, Prompt, RolloutBatch

MAX_STALENESS: Final = 1  # policy versions between those that draw ahead and those that learn


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadedAsyncRollouts:
    """Answers in a `thread`, where each rank works for itself; what ranks tell each other they tell after that."""

    pipeline: SharedRolloutPipeline
    executor: Executor

    def start(self, prompts: Sequence[Prompt], *, step: int, version: int) -> Callable[[], RolloutBatch]:
        """Begin to answer for `step`, by policy `version`; what is returned waits for all ranks' answers.

        What goes wrong in the thread is raised there, with a note of the samples that were being answered.
        """
        coming = self.executor.submit(self.pipeline.pipeline.run, prompts, step=step)
        return lambda: self._wait_for_all_ranks(coming, prompts, step, version)

    def take(self, batch: RolloutBatch, *, version: int) -> RolloutBatch:
        """This rank's part of answers from all, to be learned from at policy `version`.

        Raises:
            RuntimeError: an older policy drew them than the one before.
        """
        _check_versions(batch, range(version - MAX_STALENESS, version + 1))
        mine = rank_slice(len(batch.groups), self.pipeline.ranks)
        return replace(batch, groups=batch.groups[mine], probes=batch.probes[mine])

    def _wait_for_all_ranks(
        self, future: Future[RolloutBatch], prompts: Sequence[Prompt], step: int, version: int
    ) -> RolloutBatch:
        if (error := future.exception()) is not None:
            asked = ", ".join(prompt.sample.id for prompt in prompts)
            error.add_note(f"while the rollouts of step {step + 1} were drawn ahead, for samples {asked}")
            raise error
        mine = future.result()
        _check_versions(mine, range(version, version + 1))
        told = self.pipeline.with_metrics(mine, requested=self.pipeline.prompts_per_round, usable=len(prompts))
        of_ranks = self.pipeline.ranks.all_gather((mine.groups, mine.probes))
        return replace(
            told,
            groups=tuple(group for groups, _ in of_ranks for group in groups),
            probes=tuple(probe for _, probes in of_ranks for probe in probes),
        )


def _check_versions(batch: RolloutBatch, allowed: range) -> None:
    """Raises RuntimeError where a policy of none of these `versions` drew a token."""
    for rollout in (rollout for group in batch.groups for rollout in group):
        for segment in rollout.segments:
            if segment.author is Author.POLICY and segment.version not in allowed:
                raise RuntimeError(
                    f"sample {rollout.prompt.sample.id}, rollout {rollout.index}: drawn by policy {segment.version}, "
                    f"where {allowed.start} to {allowed.stop - 1} are allowed: steps overlap by one version at most"
                )
