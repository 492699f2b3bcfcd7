"""Ranks without processes: what the others of a collective call give is said by the test."""

from dataclasses import dataclass, field
from typing import Any

from mmrl.distributed.ranks import Ranks


@dataclass(frozen=True)
class FakeRanks(Ranks):
    """One of several ranks; `others` are the values of the rest, in rank order."""

    rank: int
    size: int
    others: tuple[Any, ...] = ()
    media_ranks: dict[str, int] = field(default_factory=dict)

    def all_gather(self, value: Any) -> list[Any]:
        return [*self.others[: self.rank], value, *self.others[self.rank :]]
