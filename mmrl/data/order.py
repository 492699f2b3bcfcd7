"""Data orders: which sample comes at which position, shuffled, sorted, by curriculum, mixed or streamed. All endless.

Training keeps the position of the next sample. An order maps positions to rows without a memory of what was taken
before, so that a resumed run continues exactly and workers can look ahead. Only `DistinctOrder` has a memory: the
samples that it moved, which the training state keeps too.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from math import isnan, log
from typing import Final, Protocol

from mmrl.config.schema import CurriculumPhaseConfig, MixtureOrderConfig, PriorityOrderConfig
from mmrl.config.schema.data import find_phase
from mmrl.types import RejectedRow, Sample, TrainingState, UserError
from mmrl.utils.seeds import derive_seed

DataRow = Sample | RejectedRow  # a row of a data source: a sample, or a row that could not be turned into one
BLOCK_SIZE: Final = 1000  # positions over which fixed shares are exact
_MAX_ROWS_AHEAD: Final = 100_000  # rows in which a step looks for a sample that it lacks
SCHEDULED_BLOCK_SIZE: Final = 100  # positions over which scheduled shares stay the same and are exact


class DataOrder(Protocol):
    """An endless order of rows. A rejected row has a position like any other, so positions never shift."""

    def take(self, start_position: int, count: int) -> Sequence[DataRow]:
        """Return the `count` rows from `start_position` on."""


class ShuffledOrder:
    """Takes every sample once per epoch, in a new random order each time."""

    def __init__(self, samples: Sequence[DataRow], seed: int, *, min_gap: int = 0) -> None:
        """Create an order of at least one sample.

        At least `min_gap` positions lie between two visits of a sample; fewer if there are few samples.
        """
        self._samples, self._seed = samples, seed
        # With more than a third, the middle could run out of samples to swap with the recent ones.
        self._min_gap = min(min_gap, len(samples) // 3)
        self._cached_epoch: tuple[int, list[int]] = (-1, [])

    def take(self, start_position: int, count: int) -> list[DataRow]:
        """Return the `count` samples from `start_position` on."""
        taken: list[DataRow] = []
        while len(taken) < count:
            epoch, start = divmod(start_position + len(taken), len(self._samples))
            if self._cached_epoch[0] != epoch:
                self._cached_epoch = (epoch, self._shuffle_epoch(epoch))
            end = start + count - len(taken)
            taken += [self._samples[index] for index in self._cached_epoch[1][start:end]]
        return taken

    def _shuffle_epoch(self, epoch: int) -> list[int]:
        """Return the indices of the samples in the order of an epoch."""
        gap, previous, order = self._min_gap, list[int](), list[int]()
        for drawn in range(epoch - 1 if epoch and gap else epoch, epoch + 1):
            previous, order = order, list(range(len(self._samples)))
            random.Random(derive_seed(self._seed, "epoch", drawn)).shuffle(order)
        recent = set(previous[-gap:])
        # Recent samples among the first are swapped with others from the middle. The last stay as they were drawn,
        # because the next epoch draws them again to know what is recent.
        middle = range(gap, len(order) - gap)
        free = (position for position in middle if order[position] not in recent)
        for position in range(gap):
            if order[position] in recent:
                free_position = next(free)
                order[position], order[free_position] = order[free_position], order[position]
        return order


class SequentialOrder:
    """Takes the samples in the same order in every epoch."""

    def __init__(self, samples: Sequence[DataRow]) -> None:
        self._samples = samples

    def take(self, start_position: int, count: int) -> list[DataRow]:
        """Return the `count` samples from `start_position` on."""
        positions = range(start_position, start_position + count)
        return [self._samples[position % len(self._samples)] for position in positions]


def sort_by_column(samples: Sequence[Sample], column: str, *, descending: bool) -> list[Sample]:
    """Return the samples sorted, stably, by a number in their `meta`; raises UserError if one has none."""
    for sample in samples:
        value = sample.meta.get(column)
        # bool is a subclass of int, and NaN has no place in an order.
        if isinstance(value, bool) or not isinstance(value, int | float) or isnan(value):
            raise UserError(f"sample {sample.id}: meta has no number {column!r} to sort by, but {value!r}")
    return sorted(samples, key=lambda row: float(row.meta[column]), reverse=descending)


class CurriculumOrder:
    """Takes from one order after another. A phase ends by its number of samples, or when its reward plateaus."""

    def __init__(
        self, orders: Sequence[DataOrder], phases: Sequence[CurriculumPhaseConfig], state: TrainingState
    ) -> None:
        """Create an order from one order for each phase.

        `state.phase_ends` is read at every take, because a plateau of the reward may end a phase during training.
        """
        self._orders, self._phases, self._state = orders, phases, state

    def take(self, start_position: int, count: int) -> list[DataRow]:
        """Return the `count` rows from `start_position` on."""
        taken: list[DataRow] = []
        while len(taken) < count:
            position = start_position + len(taken)
            phase_index, start, end = find_phase(position, self._phases, self._state.phase_ends)
            wanted = int(min(count - len(taken), end - position))
            taken += self._orders[phase_index].take(position - start, wanted)
        return taken


class PriorityOrder:
    """Samples every step without replacement, with weights that follow from each sample's last reward.

    Source: weighted sampling by exponential clocks (Efraimidis and Spirakis, 2006). The sample with the smallest E / w
    comes first, E from the standard exponential distribution.
    """

    def __init__(
        self, samples: Sequence[Sample], options: PriorityOrderConfig, state: TrainingState, seed: int
    ) -> None:
        """Create an order of at least one sample; `state` has the rewards of visits, and where the step begins."""
        self._samples, self._options, self._state, self._seed = samples, options, state, seed

    def take(self, start_position: int, count: int) -> list[DataRow]:
        """Return the `count` samples from `start_position` on, which must not lie before the step's start.

        No sample comes twice in a step before all have come once.
        """
        # Every take of a step draws the same clocks again, from the step's start, and skips what earlier takes got.
        step_start = self._state.step_data_start
        rng = random.Random(derive_seed(self._seed, "priority", step_start))
        clocks = []
        for index, sample in enumerate(self._samples):
            # 1 - random() lies in (0, 1], where the logarithm is finite.
            clocks.append((-log(1.0 - rng.random()) / self._weight(sample), index))
        offset = start_position - step_start
        first = heapq.nsmallest(offset + count, clocks)
        taken: list[DataRow] = []
        for rank in range(offset, offset + count):
            _, index = first[rank % len(first)]
            taken.append(self._samples[index])
        return taken

    def _weight(self, sample: Sample) -> float:
        visits = self._state.reward_history.get(sample.id)
        if not visits:  # a sample that was never drawn has full weight
            return 1.0
        mean = visits[-1].mean
        # The variance of a reward of 0 or 1, scaled to at most 1: half right, half wrong gives the most signal.
        priority = 4.0 * mean * (1.0 - mean) if self._options.weight_by == "uncertainty" else 1.0 - mean
        return max(self._options.min_weight, priority)


class MixtureOrder:
    """Mixes sources in blocks of positions. Each source has its quota of a block, shuffled again for each block.

    Every source runs through its own epochs, so a small one with a large share comes around more often.
    """

    def __init__(self, sources: Sequence[DataOrder], quotas_of: Callable[[int], Sequence[int]], seed: int) -> None:
        """Create a mixture; `quotas_of` returns how many positions of a block, all of one size, each source has."""
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
        # Weights become shares first: two points may have different sums, and interpolation must mix shares.
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
    exact = [weight / sum(weights) * total for weight in weights]
    quotas = list(map(int, exact))
    # The largest remainder first. The sort is stable, so of equal ones the first source gets the position.
    by_remainder = sorted(range(len(weights)), key=lambda index: quotas[index] - exact[index])
    for index in by_remainder[: total - sum(quotas)]:
        quotas[index] += 1
    return quotas


class StreamingOrder:
    """Passes rows through a shuffle buffer. Each comes once per epoch, at most about `buffer` rows before its place.

    Continuing from the last position costs nothing. A jump to another position reads the rows before it again, at most
    one whole epoch and a part of another.
    """

    def __init__(self, open_rows: Callable[[], Iterable[DataRow]], *, buffer: int, seed: int) -> None:
        """Create an order; `open_rows` starts a pass over the rows, the same ones each time, which may be endless."""
        self._open_rows, self._buffer, self._seed = open_rows, buffer, seed
        self._position = 0
        self._rows = self._rows_from_epoch(0)

    def take(self, start_position: int, count: int) -> list[DataRow]:
        """Return the `count` rows from `start_position` on.

        Raises:
            UserError: there are no rows, or `open_rows` cannot read them.
        """
        if start_position != self._position:
            self._rows = self._rows_from_position(start_position)
        self._position = start_position + count
        return list(islice(self._rows, count))

    def _rows_from_position(self, start_position: int) -> Iterator[DataRow]:
        rows = self._shuffle_epoch(0)
        num_passed = sum(1 for _ in islice(rows, start_position))
        if num_passed == start_position:
            return chain(rows, self._rows_from_epoch(1))
        # The first epoch ended before the position, so its length is known now; all epochs have the same length.
        epoch, start = divmod(start_position, num_passed)
        rows = self._rows_from_epoch(epoch)
        # A deque without length reads the rows and keeps none of them.
        deque(islice(rows, start), maxlen=0)
        return rows

    def _rows_from_epoch(self, first: int) -> Iterator[DataRow]:
        for epoch in count(first):
            yield from self._shuffle_epoch(epoch)

    def _shuffle_epoch(self, epoch: int) -> Iterator[DataRow]:
        rng = random.Random(derive_seed(self._seed, "stream", epoch))
        rows = iter(self._open_rows())
        held = list(islice(rows, self._buffer))
        if not held:
            raise UserError("data.train: a streamed source gave no rows; look at its path and options")
        for row in rows:
            index = rng.randrange(len(held))
            drawn, held[index] = held[index], row
            yield drawn
        rng.shuffle(held)
        yield from held


class CachedOrder:
    """Remembers the rows of the last take, for a caller that takes rows early and again when their step begins."""

    def __init__(self, order: DataOrder) -> None:
        self._order = order
        self._start, self._rows = 0, list[DataRow]()

    def take(self, start_position: int, count: int) -> list[DataRow]:
        """Return the `count` rows from `start_position` on."""
        held = self._rows[start_position - self._start :] if start_position >= self._start else []
        missing = count - len(held)
        if missing > 0:
            held += self._order.take(start_position + len(held), missing)
        self._start, self._rows = start_position, held
        return held[:count]


class DistinctOrder:
    """An order in which no step of an RL stage takes a sample twice.

    A sample that the step has already is swapped with the next one that it does not have, and a later step takes it.
    Rollouts derive from step and sample id, so a sample taken twice would get the same rollouts twice.
    """

    def __init__(self, order: DataOrder, state: TrainingState) -> None:
        """Create an order of the rows of `order`.

        `state` has the position where the step begins, which the loop moves, and the samples moved so far.
        """
        self._order, self._state = order, state
        self._step_start = state.step_data_start
        # With async rollouts, a resumed run has taken the first samples of its next step already.
        groups = state.next_batch.groups if state.next_batch else ()
        self._step_samples = {_sample_key(rollout.prompt.sample) for rollout in chain.from_iterable(groups)}
        self._moved_rows: dict[int, DataRow] = {}
        origins = state.moved_samples
        if origins:
            # In one take, because a stream starts again for each jump to an earlier position.
            first = min(origins.values())
            rows = order.take(first, max(origins.values()) + 1 - first)
            self._moved_rows = {position: rows[origin - first] for position, origin in origins.items()}

    def take(self, start_position: int, count: int) -> list[DataRow]:
        """Return the `count` rows from `start_position` on, with other rows in place of samples that the step has.

        Raises:
            UserError: the order has too few samples for the step.
        """
        if self._step_start != self._state.step_data_start:
            self._step_start = self._state.step_data_start
            self._step_samples.clear()
        rows = self._read_rows(start_position, count)
        for index in range(count):
            found = index
            while (key := _sample_key(rows[found])) in self._step_samples:
                found += 1
                if found > _MAX_ROWS_AHEAD:
                    raise UserError(
                        f"data.train: a step has {len(self._step_samples)} samples already, and the next {found:,} "
                        "rows of its `data_order` have no others; lower prompts_per_step, or add samples"
                    )
                if found == len(rows):
                    rows += self._read_rows(start_position, 2 * found)[found:]
            if key is not None:
                self._step_samples.add(key)
            position, new_position = start_position + index, start_position + found
            self._moved_rows.pop(position, None)
            origin = self._state.moved_samples.pop(position, position)
            if found != index:
                rows[index], rows[found] = rows[found], rows[index]
                self._moved_rows[new_position] = rows[found]
                self._state.moved_samples[new_position] = origin
        return rows[:count]

    def _read_rows(self, start_position: int, count: int) -> list[DataRow]:
        """Return the rows of the order from `start_position` on, with moved ones in their new places."""
        rows = self._order.take(start_position, count)
        return [self._moved_rows.get(position, row) for position, row in enumerate(rows, start_position)]


def _sample_key(row: DataRow) -> tuple[object, ...] | None:
    """Return what identifies a sample; None for a rejected row, of which a step may have several."""
    # With the parts, because two samples with one id are an error, which the prefetcher reports.
    return (row.id, row.parts) if isinstance(row, Sample) else None


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
