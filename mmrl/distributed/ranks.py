"""Several processes as one run. State is the same on every rank: each asks, answers and judges its share of a round's
prompts, hears of the others' groups, and from there on decides what all decide. Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar

from mmrl.ports import DemonstrationCompleter, Learner, RewardScorer, RolloutPipeline
from mmrl.types import EvalRewards, Experience, Group, Prompt, Rollout, RolloutBatch, Sample, Score, UserError

T = TypeVar("T")
RowT_co = TypeVar("RowT_co", covariant=True)


class RankLostError(UserError):
    """Another rank died, or did not come in time; the message says which, and what it was doing."""


class Ranks(Protocol):
    """The processes of a run. Whatever is called here, every rank must call, in the same order."""

    @property
    def rank(self) -> int:
        """Which of them this is, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def all_gather(self, value: T) -> list[T]:
        """What each rank gave, in rank order; at this rank's place stands the very object `mine`."""

    def on_rank0(self, work: Callable[[], T]) -> T:
        """What `work` returns on the first rank, which alone does it. A UserError there is raised on every rank."""

    def all_reduce(self, tensors: Sequence[Any]) -> None:
        """Sum torch tensors over ranks, in place."""

    def set_activity(self, activity: str) -> None:
        """Let the others know what this rank is doing now."""


class SingleProcess:
    """One process."""

    rank, size = 0, 1

    def all_reduce(self, tensors: Sequence[Any]) -> None:
        """The sum of one."""

    def set_activity(self, activity: str) -> None:
        """Nobody asks."""

    def all_gather(self, value: T) -> list[T]:
        """Nobody else gave anything."""
        return [value]

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Do it."""
        return work()


def rank_slice(count: int, ranks: Ranks) -> slice:
    """This rank's part of `count` things in a row; the parts follow each other and differ by one at most."""
    return slice(count * ranks.rank // ranks.size, count * (ranks.rank + 1) // ranks.size)


def balanced_range(sizes: Sequence[int], ranks: Ranks) -> range:
    """Which of things in a row this rank takes, so that each takes about as much; the parts follow each other."""
    whole = max(1, sum(sizes))
    middles = [end - size / 2 for size, end in zip(sizes, accumulate(sizes), strict=True)]
    takers = [min(int(middle / whole * ranks.size), ranks.size - 1) for middle in middles]
    mine = [place for place, taker in enumerate(takers) if taker == ranks.rank]
    return range(mine[0], mine[-1] + 1) if mine else range(0)


class RowOrder(Protocol[RowT_co]):
    """An endless order of rows."""

    def take(self, start_position: int, count: int) -> Sequence[RowT_co]:
        """The `count` rows that follow position `cursor`."""


class RankShard(Generic[RowT_co]):
    """This rank's part of every take of an order. Cursors are those of the whole order, so ranks may come and go.

    A round is of `places`: what is taken fills the last of them, for the first are those of groups that wait.
    """

    def __init__(self, order: RowOrder[RowT_co], ranks: Ranks, prompts_per_round: int) -> None:
        self._order, self._ranks, self._prompts_per_round = order, ranks, prompts_per_round

    def take(self, start_position: int, count: int) -> Sequence[RowT_co]:
        """This rank's part of the `count` rows that follow position `cursor`."""
        mine, waiting = rank_slice(self._prompts_per_round, self._ranks), self._prompts_per_round - count
        return self._order.take(start_position, count)[max(0, mine.start - waiting) : max(0, mine.stop - waiting)]


@dataclass(slots=True)
class MediaPlacement:
    """On which rank the prompts of a step were asked: there their media are at hand."""

    rank_by_digest: dict[str, int] = field(default_factory=dict)
    _step: int = -1

    def record(self, prompts: Sequence[Sequence[Prompt]], step: int) -> None:
        """Remember the prompts of each rank, for one step."""
        if step != self._step:
            self.rank_by_digest.clear()
            self._step = step
        self.rank_by_digest.update({prompt.digest: rank for rank, own in enumerate(prompts) for prompt in own})


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRolloutPipeline:
    """Answers this rank's prompts, tells of all ranks'. A round has `places`; `whole` makes a sharded model whole."""

    pipeline: RolloutPipeline
    ranks: Ranks
    prompts_per_round: int
    gather_for_sampling: Callable[[], AbstractContextManager[None]]

    def run(
        self, prompts: Sequence[Prompt], *, step: int, unfinished: Sequence[tuple[Rollout, ...]] = ()
    ) -> RolloutBatch:
        """A group of rollouts for each of this rank's prompts, and of its share of what is `pending` on all of them.

        What waits again waits on all. A program that looks at all ranks' rollouts is one on each of them.

        Raises:
            UserError: no rank has a usable sample.
        """
        with self.gather_for_sampling():
            answers = self.pipeline.run(
                prompts, step=step, unfinished=unfinished[rank_slice(self.prompts_per_round, self.ranks)]
            )
        answers = self.with_metrics(answers, requested=self.prompts_per_round - len(unfinished), usable=len(prompts))
        waiting = self.ranks.all_gather(answers.unfinished)
        return replace(answers, unfinished=tuple(group for own in waiting for group in own))

    def with_metrics(self, batch: RolloutBatch, *, requested: int, usable: int) -> RolloutBatch:
        """This rank's answers with the metrics of all; of the round's `asked` samples, `usable` ones came to this rank.

        Raises:
            UserError: no rank has a usable sample.
        """
        skipped = _count_dropped(requested, usable, self.ranks)
        return replace(batch, metrics={**_sum_over_ranks(batch.metrics, self.ranks), **skipped})


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRewardScorer:
    """Judges this rank's rollouts and returns all ranks' groups."""

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
        """The groups of all ranks, in the order of the samples."""
        mine = tuple(self.scorer.score_groups(rollouts, step=step, probes=probes)) if rollouts else ()
        shares = self.ranks.all_gather(mine)
        self.placement.record([[group.prompt for group in own] for own in shares], step)
        return [group for own in shares for group in own]

    def score_eval(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """One score for each of this rank's rollouts."""
        return self.scorer.score_eval(rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDemonstrationLearner:
    """A learner of demonstrations: from those of every rank. A step asks for `asked` of them."""

    learner: Learner
    ranks: Ranks
    placement: MediaPlacement
    requested: int

    def step(self, experiences: Sequence[Experience], *, step: int) -> Mapping[str, float]:
        """One step over all ranks' experiences.

        Raises:
            UserError: no rank has a usable sample.
        """
        shares = self.ranks.all_gather(list(experiences))
        self.placement.record([[experience.rollout.prompt for experience in own] for own in shares], step)
        skipped = _count_dropped(self.requested, len(experiences), self.ranks)
        return {**skipped, **self.learner.step([one for own in shares for one in own], step=step)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDemonstrationTools:
    """Answers the calls of this rank's demonstrations, tells of all ranks'."""

    tools: DemonstrationCompleter
    ranks: Ranks

    def complete(self, demonstrations: Sequence[Rollout]) -> tuple[Sequence[Rollout], Mapping[str, float]]:
        """As `Tools.complete`."""
        whole, counts = self.tools.complete(demonstrations)
        return whole, _sum_over_ranks(counts, self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMediaCheck:
    """Looks at the media of prompts: at each on one rank, where it stays at hand for the learner; all hear of all.

    One rank may still have in memory what another would find changed on disk, so none may decide by itself.
    """

    check: Callable[[Sequence[Prompt]], Mapping[str, str]]
    ranks: Ranks
    placement: MediaPlacement

    def __call__(self, prompts: Sequence[Prompt]) -> dict[str, str]:
        """What is wrong, by digest."""
        ranks = [
            self.placement.rank_by_digest.setdefault(prompt.digest, i % self.ranks.size)
            for i, prompt in enumerate(prompts)
        ]
        mine = [prompt for prompt, rank in zip(prompts, ranks, strict=True) if rank == self.ranks.rank]
        return {
            digest: problem
            for found in self.ranks.all_gather(dict(self.check(mine)))
            for digest, problem in found.items()
        }


def measure_across_ranks(
    measure: Callable[[Sequence[Sample]], EvalRewards], samples: Sequence[Sample], ranks: Ranks
) -> EvalRewards:
    """Held-out rewards of all samples, each measured on one rank; in the order of the samples whatever the ranks."""
    found: dict[str, dict[str, float]] = {}
    counts: Counter[str] = Counter()
    for of_rank in ranks.all_gather(measure(samples[ranks.rank :: ranks.size])):
        counts.update(of_rank.rollout_metrics)
        for task, rewards in of_rank.rewards.items():
            found.setdefault(task, {}).update(rewards)
    ordered: dict[str, dict[str, float]] = {}
    for sample in samples:
        ordered.setdefault(sample.task, {})[sample.id] = found[sample.task][sample.id]
    return EvalRewards(ordered, counts)


def _sum_over_ranks(counts: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
    """Counts of this rank and all others."""
    added: Counter[str] = Counter()
    for of_one in ranks.all_gather(dict(counts)):
        added.update(of_one)
    return dict(added)


def _count_dropped(requested: int, usable: int, ranks: Ranks) -> dict[str, float]:
    """How many of a round's samples could not be used, over all ranks."""
    total = sum(ranks.all_gather(usable))
    if not total:
        raise UserError(f"data.train: not one of the {requested} samples of this round can be used, on any rank")
    return {"data/dropped": float(requested - total)}
