"""Several orders in one, in given shares; still a function of the cursor alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from mmrl.algo.sampler import Order, Row
from mmrl.algo.seeds import derive
from mmrl.types import UserError

BLOCK: Final = 1000
"""Positions over which the shares are exact."""


class Mixed:
    """Blocks of `BLOCK` positions in which every source has its quota, shuffled anew for each block.

    A source goes through its own epochs, faster or slower than the others.
    """

    def __init__(self, sources: Sequence[Order], weights: Sequence[float], seed: int) -> None:
        """`weights` are relative.

        Raises:
            UserError: a weight so small that its source would never be drawn from.
        """
        self._sources, self._seed = sources, seed
        self._quotas = quotas(weights, BLOCK)
        if 0 in self._quotas:
            weight = weights[self._quotas.index(0)]
            raise UserError(
                f"data.train: weight {weight:g} of {sum(weights):g} in all is less than one sample in {BLOCK}; raise "
                "it, or take the source out"
            )
        self._planned: tuple[int, list[tuple[int, int]]] = (-1, [])

    def take(self, cursor: int, count: int) -> list[Row]:
        """The `count` rows that follow position `cursor`."""
        taken: list[Row] = []
        for position in range(cursor, cursor + count):
            block, place = divmod(position, BLOCK)
            source, rank = self._plan(block)[place]
            taken += self._sources[source].take(rank, 1)
        return taken

    def _plan(self, block: int) -> list[tuple[int, int]]:
        """For each place of a block, the source and the position in that source's own order."""
        if self._planned[0] != block:
            sources = [source for source, quota in enumerate(self._quotas) for _ in range(quota)]
            random.Random(derive(self._seed, "block", block)).shuffle(sources)
            ranks = [block * quota for quota in self._quotas]
            plan = []
            for source in sources:
                plan.append((source, ranks[source]))
                ranks[source] += 1
            self._planned = (block, plan)
        return self._planned[1]


def quotas(weights: Sequence[float], places: int) -> list[int]:
    """`places` shared out in proportion to `weights`: rounded down, the rest to the largest remainders (Hamilton)."""
    exact = [weight / sum(weights) * places for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: places - sum(shares)]:
        shares[i] += 1
    return shares
