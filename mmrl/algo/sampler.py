"""The order in which samples are seen: seeded, endless, and a function of the cursor alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mmrl.algo.seeds import derive
from mmrl.types import Sample


class Shuffled:
    """Every sample once per epoch, in an order drawn anew for each; position `cursor` always means the same sample."""

    def __init__(self, samples: Sequence[Sample], seed: int) -> None:
        if not samples:
            raise ValueError("there are no samples to draw from")
        self._samples = samples
        self._seed = seed
        self._drawn: tuple[int, list[int]] = (-1, [])

    def take(self, cursor: int, count: int) -> list[Sample]:
        """The `count` samples that follow position `cursor`."""
        taken: list[Sample] = []
        while len(taken) < count:
            epoch, start = divmod(cursor + len(taken), len(self._samples))
            order = self._order(epoch)
            taken += [self._samples[i] for i in order[start : start + count - len(taken)]]
        return taken

    def _order(self, epoch: int) -> list[int]:
        if self._drawn[0] != epoch:
            order = list(range(len(self._samples)))
            random.Random(derive(self._seed, "epoch", epoch)).shuffle(order)
            self._drawn = (epoch, order)
        return self._drawn[1]
