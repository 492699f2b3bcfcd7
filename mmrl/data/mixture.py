"""Several orders in one, in given shares; still a function of the cursor alone."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from mmrl.algo.seeds import derive_seed
from mmrl.config.schema import MixtureOrderConfig
from mmrl.data.order import DataOrder, DataRow
from mmrl.types import UserError

BLOCK_SIZE: Final = 1000
"""Positions over which fixed shares are exact."""
SCHEDULED_BLOCK_SIZE: Final = 100
"""The same for shares that change."""


class MixtureOrder:
    """Blocks of positions in which every source has its quota, shuffled anew for each block.

    A source goes through its own epochs, faster or slower than the others.
    """

    def __init__(self, sources: Sequence[DataOrder], quotas_of: Callable[[int], Sequence[int]], seed: int) -> None:
        """`quotas_of` says how many positions of a block each source has; all blocks are of one size."""
        self._sources, self._quotas_of, self._seed = sources, quotas_of, seed
        self._size = sum(quotas_of(0))
        self._block_starts: list[tuple[int, ...]] = [(0,) * len(sources)]  # positions of each source before each block
        self._cached_block: tuple[int, list[tuple[int, int]]] = (-1, [])

    def take(self, start_position: int, count: int) -> list[DataRow]:
        """The `count` rows that follow position `cursor`."""
        taken: list[DataRow] = []
        for position in range(start_position, start_position + count):
            block, place = divmod(position, self._size)
            source, rank = self._plan_block(block)[place]
            taken += self._sources[source].take(rank, 1)
        return taken

    def _plan_block(self, block: int) -> list[tuple[int, int]]:
        """For each place of a block, the source and the position in that source's own order."""
        if self._cached_block[0] != block:
            sources = [source for source, quota in enumerate(self._quotas_of(block)) for _ in range(quota)]
            random.Random(derive_seed(self._seed, "block", block)).shuffle(sources)
            ranks = list(self._source_positions(block))
            plan = []
            for source in sources:
                plan.append((source, ranks[source]))
                ranks[source] += 1
            self._cached_block = (block, plan)
        return self._cached_block[1]

    def _source_positions(self, block: int) -> tuple[int, ...]:
        for done in range(len(self._block_starts) - 1, block):
            passed = zip(self._block_starts[done], self._quotas_of(done), strict=True)
            self._block_starts.append(tuple(before + quota for before, quota in passed))
        return self._block_starts[block]


def fixed_mixture(sources: Sequence[DataOrder], weights: Sequence[float], seed: int) -> MixtureOrder:
    """A mixture whose shares stay; `weights` are relative.

    Raises:
        UserError: a weight so small that its source would never be drawn from.
    """
    shares = _checked_quotas(weights, BLOCK_SIZE, "data.train")
    return MixtureOrder(sources, lambda _: shares, seed)


def scheduled_mixture(
    sources: Sequence[DataOrder], options: MixtureOrderConfig, *, per_step: int, seed: int
) -> MixtureOrder:
    """A mixture whose shares follow the steps, each of `per_step` positions.

    Raises:
        UserError: as `fixed`.
    """
    for step, weights in options.points:
        _checked_quotas(weights, SCHEDULED_BLOCK_SIZE, f"order.points: at step {step}")
    return MixtureOrder(sources, partial(_quotas_at, options, per_step), seed)


def weights_at(options: MixtureOrderConfig, step: int) -> tuple[float, ...]:
    """The weights of the sources at a step, each point's brought to the sum 1 beforehand."""
    points = [(at, [weight / sum(weights) for weight in weights]) for at, weights in options.points]
    after = bisect_right([at for at, _ in points], step)
    if after == 0 or after == len(points):
        return tuple(points[max(after - 1, 0)][1])
    (start, low), (end, high) = points[after - 1 : after + 1]
    gone = 0.0 if options.interpolation == "steps" else (step - start) / (end - start)
    return tuple(a + (b - a) * gone for a, b in zip(low, high, strict=True))


def allocate_quotas(weights: Sequence[float], total: int) -> list[int]:
    """`places` shared out in proportion to `weights`: rounded down, the rest to the largest remainders (Hamilton)."""
    exact = [weight / sum(weights) * total for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def _quotas_at(options: MixtureOrderConfig, per_step: int, block: int) -> list[int]:
    return allocate_quotas(weights_at(options, block * SCHEDULED_BLOCK_SIZE // per_step), SCHEDULED_BLOCK_SIZE)


def _checked_quotas(weights: Sequence[float], total: int, key: str) -> list[int]:
    shares = allocate_quotas(weights, total)
    for weight, share in zip(weights, shares, strict=True):
        if weight and not share:
            raise UserError(
                f"{key}: weight {weight:g} of {sum(weights):g} in all is less than one sample in {total}; raise "
                "it, or take the source out"
            )
    return shares
