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

from mmrl.distributed.ranks import SharedProgram, share
from mmrl.types import Answers, Author, Prompt

MOST: Final = 1  # policy versions between those that draw ahead and those that learn


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Answers in a `thread`, where each rank works for itself; what ranks tell each other they tell after that."""

    shared: SharedProgram
    thread: Executor

    def begin(self, prompts: Sequence[Prompt], *, step: int, version: int) -> Callable[[], Answers]:
        """Begin to answer for `step`, by policy `version`; what is returned waits for all ranks' answers.

        What goes wrong in the thread is raised there, with a note of the samples that were being answered.
        """
        coming = self.thread.submit(self.shared.program.answer, prompts, step=step)
        return lambda: self._finished(coming, prompts, step, version)

    def due(self, answers: Answers, *, version: int) -> Answers:
        """This rank's part of answers from all, to be learned from at policy `version`.

        Raises:
            RuntimeError: an older policy drew them than the one before.
        """
        _refuse_others(answers, range(version - MOST, version + 1))
        mine = share(len(answers.groups), self.shared.ranks)
        return replace(answers, groups=answers.groups[mine], probes=answers.probes[mine])

    def _finished(self, coming: Future[Answers], prompts: Sequence[Prompt], step: int, version: int) -> Answers:
        if (error := coming.exception()) is not None:
            asked = ", ".join(prompt.sample.id for prompt in prompts)
            error.add_note(f"while the rollouts of step {step + 1} were drawn ahead, for samples {asked}")
            raise error
        mine = coming.result()
        _refuse_others(mine, range(version, version + 1))
        told = self.shared.told(mine, asked=self.shared.places, usable=len(prompts))
        of_ranks = self.shared.ranks.gather((mine.groups, mine.probes))
        return replace(
            told,
            groups=tuple(group for groups, _ in of_ranks for group in groups),
            probes=tuple(probe for _, probes in of_ranks for probe in probes),
        )


def _refuse_others(answers: Answers, versions: range) -> None:
    """Raises RuntimeError where a policy of none of these `versions` drew a token."""
    for rollout in (rollout for group in answers.groups for rollout in group):
        for segment in rollout.segments:
            if segment.author is Author.POLICY and segment.version not in versions:
                raise RuntimeError(
                    f"sample {rollout.prompt.sample.id}, rollout {rollout.index}: drawn by policy {segment.version}, "
                    f"where {versions.start} to {versions.stop - 1} are allowed: steps overlap by one version at most"
                )
