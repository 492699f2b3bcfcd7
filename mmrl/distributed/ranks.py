"""Ranks: the processes that form one run, and the share of the work that each does.

Every rank holds the same `TrainingState`. It builds, generates and scores its share of a round's prompts, then receives
the groups of the others. So all ranks take every later decision identically. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from mmrl.types import UserError

T = TypeVar("T")
RowT = TypeVar("RowT")


class RankLostError(UserError):
    """Another rank died or did not arrive in time. The message names it and its last activity."""


class Ranks:
    """The processes of one run. These methods serve a single process; `TorchRanks` overrides them for several.

    All but `set_activity` are collective: every rank must call them, in the same order, or they deadlock.
    """

    rank: int = 0  # index of this process, from 0
    size: int = 1  # number of processes in the run
    # `Prompt.digest` → the rank that has the prompt's decoded images and videos in memory, in the current step. The
    # learner trains on the prompt there if it can. `gather_groups` and `find_changed_media` write it.
    media_ranks: dict[str, int]

    def __init__(self) -> None:
        self.media_ranks = {}

    def all_gather(self, value: T) -> list[T]:
        """Return the value of every rank, in rank order. This rank's entry is `value` itself, not a copy."""
        return [value]

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 alone and return its result on every rank. A UserError is raised on every rank."""
        return work()

    def all_reduce(self, tensors: Sequence[Any]) -> None:
        """Sum torch tensors over ranks, in place."""

    def set_activity(self, activity: str) -> None:
        """Publish what this rank is doing, for the error messages and stall warnings of the others. Not collective."""


class SingleProcess(Ranks):
    """A run in one process: nothing is exchanged."""


def own_slice(count: int, ranks: Ranks) -> slice:
    """Return this rank's share of `count` consecutive items. Shares are contiguous and differ by at most one item."""
    return slice(count * ranks.rank // ranks.size, count * (ranks.rank + 1) // ranks.size)


def balanced_range(sizes: Sequence[int], ranks: Ranks) -> range:
    """Return the indices of this rank's share of items of different `sizes`.

    Shares are contiguous. An item goes to the rank into whose equal part of the total size its middle falls.
    """
    total = max(1, sum(sizes))  # 1 avoids a division by 0 if all items are empty; they then go to rank 0
    indices = []
    for index, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        owner = min(int((end - size / 2) / total * ranks.size), ranks.size - 1)
        if owner == ranks.rank:
            indices.append(index)
    return range(indices[0], indices[-1] + 1) if indices else range(0)


def own_rows(rows: Sequence[RowT], prompts_per_round: int, ranks: Ranks) -> Sequence[RowT]:
    """Return this rank's share of the rows that a round takes.

    `prompts_per_round` counts the prompts of all ranks, groups that an earlier round left unfinished included.
    """
    # A round consists of the unfinished groups, followed by the rows. Each rank works on a slice of both together, so
    # ranks stay evenly loaded, and the groups have the same order as in a single process.
    share = own_slice(prompts_per_round, ranks)
    num_unfinished = prompts_per_round - len(rows)
    return rows[max(0, share.start - num_unfinished) : max(0, share.stop - num_unfinished)]
