"""Mixtures: several orders in one, in given shares. What comes at a position still depends on the position alone."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final

from mmrl.config.schema import MixtureOrderConfig
from mmrl.data.order import DataOrder, DataRow
from mmrl.types import UserError
from mmrl.utils.seeds import derive_seed

BLOCK_SIZE: Final = 1000  # positions over which fixed shares are exact
SCHEDULED_BLOCK_SIZE: Final = 100  # positions over which scheduled shares stay the same and are exact


class MixtureOrder:
    """Mixes sources in blocks of positions. Each source has its quota of a block, shuffled anew for each block.

    Every source runs through its own epochs, so a small one with a large share comes around more often.
    """

    def __init__(self, sources: Sequence[DataOrder], quotas_of: Callable[[int], Sequence[int]], seed: int) -> None:
        """Create a mixture.

        Args:
            sources: orders to mix.
            quotas_of: returns how many positions of a block each source has. All blocks are of one size.
            seed: of the shuffling.
        """
        self._sources, self._quotas_of, self._seed = sources, quotas_of, seed
        self._size = sum(quotas_of(0))
        # Entry b holds, for each source, how many of its rows come before block b; it grows as blocks are reached.
        self._block_starts: list[tuple[int, ...]] = [(0,) * len(sources)]
        self._cached_block: tuple[int, list[tuple[int, int]]] = (-1, [])

    def take(self, start_position: int, count: int) -> list[DataRow]:
        """Return the `count` rows from `start_position` on."""
        taken: list[DataRow] = []
        for position in range(start_position, start_position + count):
            block, offset = divmod(position, self._size)
            source_index, source_position = self._plan_block(block)[offset]
            taken += self._sources[source_index].take(source_position, 1)
        return taken

    def _plan_block(self, block: int) -> list[tuple[int, int]]:
        """Return, for each position of a block, the index of a source and the position in that source's own order."""
        # Most takes ask for the block of the take before.
        if self._cached_block[0] != block:
            source_indices: list[int] = []
            for source_index, quota in enumerate(self._quotas_of(block)):
                source_indices += [source_index] * quota
            random.Random(derive_seed(self._seed, "block", block)).shuffle(source_indices)
            for done in range(len(self._block_starts) - 1, block):
                pairs = zip(self._block_starts[done], self._quotas_of(done), strict=True)
                self._block_starts.append(tuple(before + quota for before, quota in pairs))
            next_positions = list(self._block_starts[block])
            plan = []
            for source_index in source_indices:
                plan.append((source_index, next_positions[source_index]))
                next_positions[source_index] += 1
            self._cached_block = (block, plan)
        return self._cached_block[1]


def fixed_mixture(sources: Sequence[DataOrder], weights: Sequence[float], seed: int) -> MixtureOrder:
    """Return a mixture in the shares of `weights`; raises UserError if one is too small to be drawn from at all."""
    quotas = _checked_quotas(weights, BLOCK_SIZE, "data.train")
    return MixtureOrder(sources, lambda _: quotas, seed)


def scheduled_mixture(
    sources: Sequence[DataOrder], options: MixtureOrderConfig, *, per_step: int, seed: int
) -> MixtureOrder:
    """Return a mixture whose shares follow the steps, each of `per_step` positions; raises as `fixed_mixture`."""
    for step, weights in options.points:
        _checked_quotas(weights, SCHEDULED_BLOCK_SIZE, f"data_order.points: at step {step}")

    def quotas_of(block: int) -> list[int]:
        step = block * SCHEDULED_BLOCK_SIZE // per_step
        return allocate_quotas(weights_at(options, step), SCHEDULED_BLOCK_SIZE)

    return MixtureOrder(sources, quotas_of, seed)


def weights_at(options: MixtureOrderConfig, step: int) -> tuple[float, ...]:
    """Return the weights of the sources at a step, which add up to 1."""
    steps: list[int] = []
    shares: list[tuple[float, ...]] = []
    for point_step, weights in options.points:
        steps.append(point_step)
        # Scaled first, so that interpolation mixes shares: points may be written to different sums.
        total = sum(weights)
        shares.append(tuple(weight / total for weight in weights))
    following = bisect_right(steps, step)
    if following == 0:
        return shares[0]
    if following == len(steps) or options.interpolation == "steps":
        return shares[following - 1]
    start, end = steps[following - 1], steps[following]
    progress = (step - start) / (end - start)
    pairs = zip(shares[following - 1], shares[following], strict=True)
    return tuple(before + (after - before) * progress for before, after in pairs)


def allocate_quotas(weights: Sequence[float], total: int) -> list[int]:
    """Split `total` positions in proportion to `weights`, by the largest remainders (Hamilton's method)."""
    weight_sum = sum(weights)
    quotas: list[int] = []
    negative_remainders: list[float] = []
    for weight in weights:
        exact = weight / weight_sum * total
        quotas.append(int(exact))
        # Negative, so that the largest remainder sorts first.
        negative_remainders.append(int(exact) - exact)
    # The sort is stable, so of equal remainders the first source gets the position.
    by_remainder = sorted(range(len(weights)), key=negative_remainders.__getitem__)
    for index in by_remainder[: total - sum(quotas)]:
        quotas[index] += 1
    return quotas


def _checked_quotas(weights: Sequence[float], total: int, key: str) -> list[int]:
    """Return the quotas of a block; raise a UserError that names the YAML `key` if a positive weight gets none."""
    quotas = allocate_quotas(weights, total)
    for weight, quota in zip(weights, quotas, strict=True):
        if weight and not quota:
            raise UserError(
                f"{key}: weight {weight:g} of {sum(weights):g} in all is less than one sample in {total}; raise "
                "it, or take the source out"
            )
    return quotas
