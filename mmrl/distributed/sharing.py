"""Ports for runs of several ranks: each wraps a part of one rank and exchanges what the other ranks need of it.

A run in one process uses the parts themselves. A collective call waits until every rank has made it, so all ranks must
make the same ones in the same order, also a rank that has nothing to give:

    call                                 collective   why
    `SharedRolloutPipeline.run`          yes          sums metrics, gathers unfinished groups and a sharded policy
    `SharedRewardScorer.score_groups`    yes          gathers the scored groups of all ranks
    `SharedRewardScorer.score_eval`      no           scores this rank's rollouts; its callers exchange what they need
    `SharedDemonstrationLearner.step`    yes          gathers demonstrations; the wrapped learner sums gradients
    `SharedDemonstrationTools.complete`  yes          sums the counts of tool calls
    `check_media_across_ranks`           yes          gathers what each rank found wrong
    `measure_across_ranks`               yes          gathers rewards of held-out samples
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain

from mmrl.distributed.ranks import MediaPlacement, Ranks, rank_slice, sum_over_ranks
from mmrl.ports import DemonstrationCompleter, Learner, RewardScorer, RolloutPipeline
from mmrl.types import EvalRewards, Experience, Group, Prompt, Rollout, RolloutBatch, Sample, Score

MediaCheck = Callable[[Sequence[Prompt]], Mapping[str, str]]
"""Returns what is wrong with the media of prompts, by digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRolloutPipeline:
    """A `RolloutPipeline` that runs this rank's prompts and sums metrics over ranks."""

    pipeline: RolloutPipeline
    ranks: Ranks
    prompts_per_round: int
    """Prompts of one round over all ranks, unfinished groups included."""
    gather_for_sampling: Callable[[], AbstractContextManager[None]]
    """Gathers a sharded policy, so that it can generate."""

    def run(
        self, prompts: Sequence[Prompt], *, step: int, unfinished: Sequence[tuple[Rollout, ...]] = ()
    ) -> RolloutBatch:
        """Return the groups of this rank's `prompts` and of its share of `unfinished`.

        `unfinished` holds the waiting groups of all ranks, in argument and result alike.
        """
        # The unfinished groups take the first places of the round, so the slice of places is theirs, too.
        own_unfinished = unfinished[rank_slice(self.prompts_per_round, self.ranks)]
        with self.gather_for_sampling():
            batch = self.pipeline.run(prompts, step=step, unfinished=own_unfinished)
        metrics = sum_over_ranks(batch.metrics, self.ranks)
        all_unfinished = tuple(chain.from_iterable(self.ranks.all_gather(batch.unfinished)))
        return replace(batch, metrics=metrics, unfinished=all_unfinished)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRewardScorer:
    """A `RewardScorer` that scores this rank's rollouts and returns the groups of all ranks."""

    scorer: RewardScorer
    ranks: Ranks
    placement: MediaPlacement

    def score_groups(
        self,
        rollouts: Sequence[Sequence[Rollout]],
        *,
        step: int,
        probes: Sequence[Mapping[str, Sequence[Rollout]]] = (),
    ) -> list[Group]:
        """Score this rank's `rollouts` and return all ranks' groups, in the order of the samples."""
        # A rank without a usable sample has no rollouts, but takes part in the exchange.
        own = tuple(self.scorer.score_groups(rollouts, step=step, probes=probes)) if rollouts else ()
        groups_by_rank = self.ranks.all_gather(own)
        prompts_by_rank = []
        for groups in groups_by_rank:
            prompts_by_rank.append([group.prompt for group in groups])
        self.placement.record(prompts_by_rank, step)
        return list(chain.from_iterable(groups_by_rank))

    def score_eval(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """Return one score for each of this rank's rollouts; nothing is exchanged."""
        return self.scorer.score_eval(rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDemonstrationLearner:
    """A `Learner` for supervised stages, where each rank brings its own share of the batch."""

    learner: Learner
    ranks: Ranks
    placement: MediaPlacement

    def step(self, experiences: Sequence[Experience], *, step: int) -> Mapping[str, float]:
        """Take one optimizer step over the experiences of all ranks."""
        prompts_by_rank = []
        all_experiences: list[Experience] = []
        for rank_experiences in self.ranks.all_gather(list(experiences)):
            prompts_by_rank.append([experience.rollout.prompt for experience in rank_experiences])
            all_experiences += rank_experiences
        self.placement.record(prompts_by_rank, step)
        return self.learner.step(all_experiences, step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDemonstrationTools:
    """A `DemonstrationCompleter` that completes this rank's demonstrations and sums the call counts over ranks."""

    tools: DemonstrationCompleter
    ranks: Ranks

    def complete(self, demonstrations: Sequence[Rollout]) -> tuple[Sequence[Rollout], Mapping[str, float]]:
        """Return this rank's demonstrations with tool results, and the counts of all ranks' calls."""
        completed, counts = self.tools.complete(demonstrations)
        return completed, sum_over_ranks(counts, self.ranks)


def check_media_across_ranks(
    prompts: Sequence[Prompt], *, check: MediaCheck, ranks: Ranks, placement: MediaPlacement
) -> dict[str, str]:
    """Check the media of each prompt on one rank; return on all ranks what is wrong with them, by digest.

    `placement` learns which rank has just decoded a prompt's media, so that the learner uses them there.
    """
    # One rank may still hold in memory a file that another would find changed on disk. If each decided for itself,
    # ranks would drop different rollouts and disagree about the step from then on.
    own_prompts = []
    for index, prompt in enumerate(prompts):
        rank = placement.rank_by_digest.setdefault(prompt.digest, index % ranks.size)
        if rank == ranks.rank:
            own_prompts.append(prompt)
    problems: dict[str, str] = {}
    for found in ranks.all_gather(dict(check(own_prompts))):
        problems |= found
    return problems


def measure_across_ranks(
    measure: Callable[[Sequence[Sample]], EvalRewards], samples: Sequence[Sample], ranks: Ranks
) -> EvalRewards:
    """Measure held-out rewards, each sample on one rank. The result has the order of `samples` for any rank count."""
    # Every n-th sample and not a contiguous share: where samples of a long task stand together, all ranks get some.
    measured: dict[str, dict[str, float]] = {}
    counts: Counter[str] = Counter()
    for rank_result in ranks.all_gather(measure(samples[ranks.rank :: ranks.size])):
        counts.update(rank_result.rollout_metrics)
        for task, rewards in rank_result.rewards.items():
            measured.setdefault(task, {}).update(rewards)
    # Dictionaries keep their order, and metrics are written in it: it must not depend on the number of ranks.
    ordered: dict[str, dict[str, float]] = {}
    for sample in samples:
        ordered.setdefault(sample.task, {})[sample.id] = measured[sample.task][sample.id]
    return EvalRewards(ordered, counts)
