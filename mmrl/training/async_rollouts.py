"""Asynchronous rollouts: a step's first round is generated while the step before it is being learned.

Source: Noukhovitch et al., "Asynchronous RLHF", arXiv:2410.18252. A prefetched round, one that was generated ahead of
its step, is complete before the sampler receives new weights and before anything is saved. Its tokens therefore depend
on the policy version and on seeds, not on which of the two threads was faster, and a checkpoint holds it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from mmrl.config.schema import RlStage
from mmrl.distributed.ranks import Ranks, count_dropped_samples, rank_slice, sum_over_ranks
from mmrl.ports import RolloutPipeline
from mmrl.training import rl
from mmrl.types import Author, Prompt, Rollout, RolloutBatch, TrainingState

# Policy versions between the weights that generate a prefetched round and the weights that learn from it.
MAX_STALENESS: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncRollouts:
    """Generates the next step's first round in a background thread.

    The thread works on this rank's prompts alone. Ranks exchange rollouts after it has finished, in the main thread,
    because collectives of two threads could meet in different orders on different ranks.
    """

    pipeline: RolloutPipeline  # the pipeline of this rank
    ranks: Ranks
    prompts_per_round: int  # prompts of one round over all ranks
    executor: Executor  # runs one call at a time in a thread of its own

    def start(self, prompts: Sequence[Prompt], *, step: int, version: int) -> Callable[[], RolloutBatch]:
        """Start generating for `step` with policy `version`; return a function that waits for the batch of all ranks.

        Until that function has returned, no other rollouts may be drawn and no sampler may sync. An error in the thread
        is raised by that function, with a note that names the samples.
        """
        future = self.executor.submit(self.pipeline.run, prompts, step=step)
        return partial(self._wait, future, prompts, step, version)

    def take(self, batch: RolloutBatch, *, version: int) -> RolloutBatch:
        """Return this rank's share of a prefetched batch, to be learned from at policy `version`.

        Raises:
            RuntimeError: the tokens are more than `MAX_STALENESS` versions old.
        """
        _check_versions(batch, range(version - MAX_STALENESS, version + 1))
        own = rank_slice(len(batch.groups), self.ranks)
        return replace(batch, groups=batch.groups[own], probes=batch.probes[own])

    def _wait(self, future: Future[RolloutBatch], prompts: Sequence[Prompt], step: int, version: int) -> RolloutBatch:
        """Return the groups and summed metrics of all ranks, once this rank's thread has finished."""
        error = future.exception()
        if error is not None:
            sample_ids = ", ".join(prompt.sample.id for prompt in prompts)
            error.add_note(f"while the rollouts of step {step + 1} were generated in advance, for samples {sample_ids}")
            raise error
        own = future.result()
        _check_versions(own, range(version, version + 1))
        metrics = sum_over_ranks(own.metrics, self.ranks)
        metrics |= count_dropped_samples(self.prompts_per_round, len(prompts), self.ranks)
        # Every rank keeps the groups of all, so that each can save the same state.
        groups: list[tuple[Rollout, ...]] = []
        probes: list[Mapping[str, tuple[Rollout, ...]]] = []
        for rank_groups, rank_probes in self.ranks.all_gather((own.groups, own.probes)):
            groups += rank_groups
            probes += rank_probes
        return replace(own, groups=tuple(groups), probes=tuple(probes), metrics=metrics)


def run_async_rl_stage(
    settings: rl.RlSettings, components: rl.RlComponents, async_rollouts: AsyncRollouts, state: TrainingState
) -> None:
    """Train an RL stage as `run_rl_stage` does, but generate while the learner works.

    Only the first round of a step is prefetched. The stage's first step has none, and its last step starts none.
    """
    while state.step < settings.num_steps and not state.stage_done:
        collected = rl.CollectedGroups()
        timer = collected.timer
        if state.prefetched is not None:
            batch = async_rollouts.take(state.prefetched, version=state.version)
            state.prefetched = None
            rl.score_batch(components, state, batch, collected)
        # Does nothing if the prefetched round was enough.
        rl.collect_groups(settings, components, state, collected)

        with timer.time("select"):
            selected = components.selector.select(collected.groups, state)

        wait_for_next = None
        if state.step + 1 < settings.num_steps:
            prompts = rl.build_prompts(components, state, settings.prompts_per_round, timer)
            wait_for_next = async_rollouts.start(prompts, step=state.step + 1, version=state.version)
        with timer.time("learn"):
            learner_metrics = components.learner.step(selected.experiences, step=state.step)
            reference_metrics = components.update_reference(state.step)
        # The thread samples with the weights of `state.version`: it must be done before the sampler gets new ones.
        if wait_for_next is not None:
            with timer.time("rollout"):
                state.prefetched = wait_for_next()
        with timer.time("learn"):
            components.sync_weights(state.version + 1)
        rl.end_step(components, state, collected, selected, {**learner_metrics, **reference_metrics})


def describe_lengthening(stage: object, state: TrainingState) -> str:
    """Return a sentence that says if a lengthened stage will end like one that was longer from the start.

    `state` is that of the checkpoint that the stage goes on from.
    """
    # The last step of a stage prefetches nothing.
    if isinstance(stage, RlStage) and stage.async_rollouts and state.step and state.prefetched is None:
        return (
            f"Stage {stage.name} will not end like one that had {stage.steps} steps from the start: step {state.step} "
            "was its last one, and generated no rollouts for the next."
        )
    return "The stage will end like one that had so many steps from the start."


def _check_versions(batch: RolloutBatch, allowed: range) -> None:
    """Raise RuntimeError if a policy version outside `allowed` generated a token of the batch."""
    for group in batch.groups:
        for rollout in group:
            for segment in rollout.segments:
                if segment.author is Author.POLICY and segment.version not in allowed:
                    raise RuntimeError(
                        f"sample {rollout.prompt.sample.id}, rollout {rollout.index}: generated by policy version "
                        f"{segment.version}, but only {allowed.start} to {allowed.stop - 1} are allowed: asynchronous "
                        f"rollouts may be {MAX_STALENESS} version old at most"
                    )
