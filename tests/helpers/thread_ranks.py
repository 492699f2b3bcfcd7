"""Ranks that are threads of the test's process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from mmrl.distributed.ranks import Ranks
from mmrl.types import UserError

TIMEOUT_S = 60


class ThreadRank(Ranks):
    """One of several ranks; they exchange values through a list that they share."""

    def __init__(self, rank: int, barrier: Barrier, values: list[Any]) -> None:
        super().__init__()
        self.rank, self.size = rank, barrier.parties
        self._barrier, self._values = barrier, values

    def all_gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(TIMEOUT_S)
        gathered = list(self._values)
        self._barrier.wait(TIMEOUT_S)
        return gathered

    def on_rank0(self, work: Callable[[], Any]) -> Any:
        result = None
        if self.rank == 0:
            try:
                result = work()
            except UserError as error:
                result = error
        result = self.all_gather(result)[0]
        if isinstance(result, UserError):
            raise result
        return result


def run_on_ranks(count: int, work: Callable[[ThreadRank], Any]) -> list[Any]:
    """Return what `work` returns on each of `count` ranks."""
    barrier, values = Barrier(count), [None] * count
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: work(ThreadRank(rank, barrier, values)), range(count)))
