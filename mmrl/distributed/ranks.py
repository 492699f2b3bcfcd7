"""One process or several as one run: how many there are, which one this is, and which part of the work is its own.

Every rank holds the same `TrainingState`. Each builds, generates and scores its share of a round's prompts and then
receives the groups of the others, so that every later decision is taken identically everywhere. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar

from mmrl.types import Prompt, UserError

T = TypeVar("T")
RowT_co = TypeVar("RowT_co", covariant=True)


class RankLostError(UserError):
    """Another rank died or did not arrive in time. The message says which one, and what it was doing last."""


class Ranks(Protocol):
    """The processes of one run. All methods but `set_activity` are collective: all ranks call them in one order."""

    @property
    def rank(self) -> int:
        """Index of this process, from 0."""

    @property
    def size(self) -> int:
        """Number of processes in the run."""

    def all_gather(self, value: T) -> list[T]:
        """Return the value of every rank, in rank order. This rank's entry is `value` itself, not a copy."""

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 alone and return its result on every rank. A UserError is raised on every rank."""

    def all_reduce(self, tensors: Sequence[Any]) -> None:
        """Sum torch tensors over ranks, in place."""

    def set_activity(self, activity: str) -> None:
        """Publish what this rank is doing, for the error messages and stall warnings of the others. Not collective."""


class SingleProcess:
    """The `Ranks` of a run in one process: nothing is exchanged."""

    rank, size = 0, 1

    def all_gather(self, value: T) -> list[T]:
        """Return the value of the only rank."""
        return [value]

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` and return its result."""
        return work()

    def all_reduce(self, tensors: Sequence[Any]) -> None:
        """Leave the tensors as they are: the sum over one rank."""

    def set_activity(self, activity: str) -> None:
        """Publish nothing: there is no other rank to read it."""


def rank_slice(count: int, ranks: Ranks) -> slice:
    """Return this rank's share of `count` consecutive items. Shares are contiguous and differ by at most one item."""
    return slice(count * ranks.rank // ranks.size, count * (ranks.rank + 1) // ranks.size)


def balanced_range(sizes: Sequence[int], ranks: Ranks) -> range:
    """Return the indices of this rank's share of items of different `sizes`.

    Shares are contiguous. An item goes to the rank into whose equal part of the total size its middle falls.
    """
    total = max(1, sum(sizes))
    own = []
    for index, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        owner = min(int((end - size / 2) / total * ranks.size), ranks.size - 1)
        if owner == ranks.rank:
            own.append(index)
    return range(own[0], own[-1] + 1) if own else range(0)


class RowOrder(Protocol[RowT_co]):
    """An endless order of rows, addressed by position."""

    def take(self, start_position: int, count: int) -> Sequence[RowT_co]:
        """Return `count` rows from `start_position` on."""


class RankShard(Generic[RowT_co]):
    """This rank's share of each `take` from an order.

    Positions are those of the whole order, so a run may continue with another number of ranks. A round consists of
    `prompts_per_round` prompts. Groups left unfinished by the step before occupy the first places of the round, and the
    rows taken here fill the places behind them.
    """

    def __init__(self, order: RowOrder[RowT_co], ranks: Ranks, prompts_per_round: int) -> None:
        self._order, self._ranks, self._prompts_per_round = order, ranks, prompts_per_round

    def take(self, start_position: int, count: int) -> Sequence[RowT_co]:
        """Return this rank's share of the `count` rows from `start_position` on."""
        own_places = rank_slice(self._prompts_per_round, self._ranks)
        num_unfinished = self._prompts_per_round - count
        start = max(0, own_places.start - num_unfinished)
        stop = max(0, own_places.stop - num_unfinished)
        return self._order.take(start_position, count)[start:stop]


@dataclass(slots=True)
class MediaPlacement:
    """Records which rank built each prompt of the current step and so has its decoded media in memory.

    The learner prefers to train a group on that rank.
    """

    rank_by_digest: dict[str, int] = field(default_factory=dict)
    """Rank by `Prompt.digest`."""
    _step: int = -1
    """The step that the entries belong to; -1 before the first."""

    def record(self, prompts_by_rank: Sequence[Sequence[Prompt]], step: int) -> None:
        """Add the prompts of each rank. The first call for a new step drops those of the step before."""
        if step != self._step:
            self.rank_by_digest.clear()
            self._step = step
        for rank, prompts in enumerate(prompts_by_rank):
            for prompt in prompts:
                self.rank_by_digest[prompt.digest] = rank
