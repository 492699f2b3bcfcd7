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

from mmrl.ports import Judge, Learner, Program, Tools
from mmrl.types import Answers, Experience, Group, HeldOut, Prompt, Rollout, Sample, Score, UserError

T = TypeVar("T")
RowT_co = TypeVar("RowT_co", covariant=True)


class RankLost(UserError):
    """Another rank died, or did not come in time; the message says which, and what it was doing."""


class Ranks(Protocol):
    """The processes of a run. Whatever is called here, every rank must call, in the same order."""

    @property
    def rank(self) -> int:
        """Which of them this is, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def gather(self, mine: T) -> list[T]:
        """What each rank gave, in rank order; at this rank's place stands the very object `mine`."""

    def once(self, work: Callable[[], T]) -> T:
        """What `work` returns on the first rank, which alone does it. A UserError there is raised on every rank."""

    def add(self, tensors: Sequence[Any]) -> None:
        """Sum torch tensors over ranks, in place."""

    def note(self, doing: str) -> None:
        """Let the others know what this rank is doing now."""


class Alone:
    """One process."""

    rank, size = 0, 1

    def add(self, tensors: Sequence[Any]) -> None:
        """The sum of one."""

    def note(self, doing: str) -> None:
        """Nobody asks."""

    def gather(self, mine: T) -> list[T]:
        """Nobody else gave anything."""
        return [mine]

    def once(self, work: Callable[[], T]) -> T:
        """Do it."""
        return work()


def share(count: int, ranks: Ranks) -> slice:
    """This rank's part of `count` things in a row; the parts follow each other and differ by one at most."""
    return slice(count * ranks.rank // ranks.size, count * (ranks.rank + 1) // ranks.size)


def even_part(sizes: Sequence[int], ranks: Ranks) -> range:
    """Which of things in a row this rank takes, so that each takes about as much; the parts follow each other."""
    whole = max(1, sum(sizes))
    middles = [end - size / 2 for size, end in zip(sizes, accumulate(sizes), strict=True)]
    takers = [min(int(middle / whole * ranks.size), ranks.size - 1) for middle in middles]
    mine = [place for place, taker in enumerate(takers) if taker == ranks.rank]
    return range(mine[0], mine[-1] + 1) if mine else range(0)


class Rows(Protocol[RowT_co]):
    """An endless order of rows."""

    def take(self, cursor: int, count: int) -> Sequence[RowT_co]:
        """The `count` rows that follow position `cursor`."""


class Portion(Generic[RowT_co]):
    """This rank's part of every take of an order. Cursors are those of the whole order, so ranks may come and go.

    A round is of `places`: what is taken fills the last of them, for the first are those of groups that wait.
    """

    def __init__(self, order: Rows[RowT_co], ranks: Ranks, places: int) -> None:
        self._order, self._ranks, self._places = order, ranks, places

    def take(self, cursor: int, count: int) -> Sequence[RowT_co]:
        """This rank's part of the `count` rows that follow position `cursor`."""
        mine, waiting = share(self._places, self._ranks), self._places - count
        return self._order.take(cursor, count)[max(0, mine.start - waiting) : max(0, mine.stop - waiting)]


@dataclass(slots=True)
class Homes:
    """On which rank the prompts of a step were asked: there their media are at hand."""

    rank_of: dict[str, int] = field(default_factory=dict)
    _step: int = -1

    def note(self, prompts: Sequence[Sequence[Prompt]], step: int) -> None:
        """Remember the prompts of each rank, for one step."""
        if step != self._step:
            self.rank_of.clear()
            self._step = step
        self.rank_of.update({prompt.digest: rank for rank, own in enumerate(prompts) for prompt in own})


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedProgram:
    """Answers this rank's prompts, tells of all ranks'. A round has `places`; `whole` makes a sharded model whole."""

    program: Program
    ranks: Ranks
    places: int
    whole: Callable[[], AbstractContextManager[None]]

    def answer(self, prompts: Sequence[Prompt], *, step: int, pending: Sequence[tuple[Rollout, ...]] = ()) -> Answers:
        """A group of rollouts for each of this rank's prompts, and of its share of what is `pending` on all of them.

        What waits again waits on all. A program that looks at all ranks' rollouts is one on each of them.

        Raises:
            UserError: no rank has a usable sample.
        """
        with self.whole():
            answers = self.program.answer(prompts, step=step, pending=pending[share(self.places, self.ranks)])
        answers = self.told(answers, asked=self.places - len(pending), usable=len(prompts))
        waiting = self.ranks.gather(answers.pending)
        return replace(answers, pending=tuple(group for own in waiting for group in own))

    def told(self, answers: Answers, *, asked: int, usable: int) -> Answers:
        """This rank's answers with the metrics of all; of the round's `asked` samples, `usable` ones came to this rank.

        Raises:
            UserError: no rank has a usable sample.
        """
        skipped = _skipped(asked, usable, self.ranks)
        return replace(answers, metrics={**_added(answers.metrics, self.ranks), **skipped})


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedJudge:
    """Judges this rank's rollouts and returns all ranks' groups."""

    inner: Judge
    ranks: Ranks
    homes: Homes

    def judge(
        self,
        rollouts: Sequence[Sequence[Rollout]],
        *,
        step: int,
        probes: Sequence[Mapping[str, Sequence[Rollout]]] = (),
    ) -> list[Group]:
        """The groups of all ranks, in the order of the samples."""
        mine = tuple(self.inner.judge(rollouts, step=step, probes=probes)) if rollouts else ()
        shares = self.ranks.gather(mine)
        self.homes.note([[group.prompt for group in own] for own in shares], step)
        return [group for own in shares for group in own]

    def evaluate(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """One score for each of this rank's rollouts."""
        return self.inner.evaluate(rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLessons:
    """A learner of demonstrations: from those of every rank. A step asks for `asked` of them."""

    learner: Learner
    ranks: Ranks
    homes: Homes
    asked: int

    def learn(self, experiences: Sequence[Experience], *, step: int) -> Mapping[str, float]:
        """One step over all ranks' experiences.

        Raises:
            UserError: no rank has a usable sample.
        """
        shares = self.ranks.gather(list(experiences))
        self.homes.note([[experience.rollout.prompt for experience in own] for own in shares], step)
        skipped = _skipped(self.asked, len(experiences), self.ranks)
        return {**skipped, **self.learner.learn([one for own in shares for one in own], step=step)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTools:
    """Answers the calls of this rank's demonstrations, tells of all ranks'."""

    tools: Tools
    ranks: Ranks

    def complete(self, demonstrations: Sequence[Rollout]) -> tuple[Sequence[Rollout], Mapping[str, float]]:
        """As `Tools.complete`."""
        whole, counts = self.tools.complete(demonstrations)
        return whole, _added(counts, self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLook:
    """Looks at the media of prompts: at each on one rank, where it stays at hand for the learner; all hear of all.

    One rank may still have in memory what another would find changed on disk, so none may decide by itself.
    """

    look: Callable[[Sequence[Prompt]], Mapping[str, str]]
    ranks: Ranks
    homes: Homes

    def __call__(self, prompts: Sequence[Prompt]) -> dict[str, str]:
        """What is wrong, by digest."""
        ranks = [self.homes.rank_of.setdefault(prompt.digest, i % self.ranks.size) for i, prompt in enumerate(prompts)]
        mine = [prompt for prompt, rank in zip(prompts, ranks, strict=True) if rank == self.ranks.rank]
        return {
            digest: problem for found in self.ranks.gather(dict(self.look(mine))) for digest, problem in found.items()
        }


def shared_measure(measure: Callable[[Sequence[Sample]], HeldOut], samples: Sequence[Sample], ranks: Ranks) -> HeldOut:
    """Held-out rewards of all samples, each measured on one rank; in the order of the samples whatever the ranks."""
    found: dict[str, dict[str, float]] = {}
    counts: Counter[str] = Counter()
    for of_rank in ranks.gather(measure(samples[ranks.rank :: ranks.size])):
        counts.update(of_rank.counts)
        for task, rewards in of_rank.rewards.items():
            found.setdefault(task, {}).update(rewards)
    ordered: dict[str, dict[str, float]] = {}
    for sample in samples:
        ordered.setdefault(sample.task, {})[sample.id] = found[sample.task][sample.id]
    return HeldOut(ordered, counts)


def _added(counts: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
    """Counts of this rank and all others."""
    added: Counter[str] = Counter()
    for of_one in ranks.gather(dict(counts)):
        added.update(of_one)
    return dict(added)


def _skipped(asked: int, usable: int, ranks: Ranks) -> dict[str, float]:
    """How many of a round's samples could not be used, over all ranks."""
    total = sum(ranks.gather(usable))
    if not total:
        raise UserError(f"data.train: not one of the {asked} samples of this round can be used, on any rank")
    return {"data/skipped": float(asked - total)}
