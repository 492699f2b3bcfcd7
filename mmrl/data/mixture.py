"""Several orders in one, in given shares; still a function of the cursor alone."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from mmrl.algo.seeds import derive
from mmrl.config.schema import Mixture
from mmrl.data.order import Order, Row
from mmrl.types import UserError

BLOCK: Final = 1000
"""Positions over which fixed shares are exact."""
SHORT_BLOCK: Final = 100
"""The same for shares that change."""


class Mixed:
    """Blocks of positions in which every source has its quota, shuffled anew for each block.

    A source goes through its own epochs, faster or slower than the others.
    """

    def __init__(self, sources: Sequence[Order], quotas_of: Callable[[int], Sequence[int]], seed: int) -> None:
        """`quotas_of` says how many positions of a block each source has; all blocks are of one size."""
        self._sources, self._quotas_of, self._seed = sources, quotas_of, seed
        self._size = sum(quotas_of(0))
        self._before: list[tuple[int, ...]] = [(0,) * len(sources)]  # positions of each source before each block
        self._planned: tuple[int, list[tuple[int, int]]] = (-1, [])

    def take(self, cursor: int, count: int) -> list[Row]:
        """The `count` rows that follow position `cursor`."""
        taken: list[Row] = []
        for position in range(cursor, cursor + count):
            block, place = divmod(position, self._size)
            source, rank = self._plan(block)[place]
            taken += self._sources[source].take(rank, 1)
        return taken

    def _plan(self, block: int) -> list[tuple[int, int]]:
        """For each place of a block, the source and the position in that source's own order."""
        if self._planned[0] != block:
            sources = [source for source, quota in enumerate(self._quotas_of(block)) for _ in range(quota)]
            random.Random(derive(self._seed, "block", block)).shuffle(sources)
            ranks = list(self._start(block))
            plan = []
            for source in sources:
                plan.append((source, ranks[source]))
                ranks[source] += 1
            self._planned = (block, plan)
        return self._planned[1]

    def _start(self, block: int) -> tuple[int, ...]:
        for done in range(len(self._before) - 1, block):
            passed = zip(self._before[done], self._quotas_of(done), strict=True)
            self._before.append(tuple(before + quota for before, quota in passed))
        return self._before[block]


def fixed(sources: Sequence[Order], weights: Sequence[float], seed: int) -> Mixed:
    """A mixture whose shares stay; `weights` are relative.

    Raises:
        UserError: a weight so small that its source would never be drawn from.
    """
    shares = _counted(weights, BLOCK, "data.train")
    return Mixed(sources, lambda _: shares, seed)


def scheduled(sources: Sequence[Order], options: Mixture, *, per_step: int, seed: int) -> Mixed:
    """A mixture whose shares follow the steps, each of `per_step` positions.

    Raises:
        UserError: as `fixed`.
    """
    for step, weights in options.points:
        _counted(weights, SHORT_BLOCK, f"order.points: at step {step}")
    return Mixed(sources, partial(_quotas_at, options, per_step), seed)


def weights_at(options: Mixture, step: int) -> tuple[float, ...]:
    """The weights of the sources at a step, each point's brought to the sum 1 beforehand."""
    points = [(at, [weight / sum(weights) for weight in weights]) for at, weights in options.points]
    after = bisect_right([at for at, _ in points], step)
    if after == 0 or after == len(points):
        return tuple(points[max(after - 1, 0)][1])
    (start, low), (end, high) = points[after - 1 : after + 1]
    gone = 0.0 if options.shape == "steps" else (step - start) / (end - start)
    return tuple(a + (b - a) * gone for a, b in zip(low, high, strict=True))


def quotas(weights: Sequence[float], places: int) -> list[int]:
    """`places` shared out in proportion to `weights`: rounded down, the rest to the largest remainders (Hamilton)."""
    exact = [weight / sum(weights) * places for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: places - sum(shares)]:
        shares[i] += 1
    return shares


def _quotas_at(options: Mixture, per_step: int, block: int) -> list[int]:
    return quotas(weights_at(options, block * SHORT_BLOCK // per_step), SHORT_BLOCK)


def _counted(weights: Sequence[float], places: int, where: str) -> list[int]:
    shares = quotas(weights, places)
    for weight, share in zip(weights, shares, strict=True):
        if weight and not share:
            raise UserError(
                f"{where}: weight {weight:g} of {sum(weights):g} in all is less than one sample in {places}; raise "
                "it, or take the source out"
            )
    return shares
