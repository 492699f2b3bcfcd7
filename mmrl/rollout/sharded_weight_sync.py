"""Weights that several ranks hold, for an engine that the first rank alone feeds: gathered a few at a time.

Where weights are divided, a pass over them needs every rank, and only the engine knows how often it passes. So the
first rank calls the others to each pass, and tells them when there are no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mmrl.distributed.ranks import Ranks
from mmrl.rollout.weight_sync import Shape, Weights
from mmrl.types import UserError


class Relay:
    """The weights as the first rank's engine takes them; no rank ever holds more of them than a pass gathers."""

    def __init__(self, weights: Weights, ranks: Ranks) -> None:
        self.weights, self._ranks = weights, ranks
        self._shapes: list[Shape] | None = None
        self._under_way: Iterator[tuple[str, torch.Tensor]] = iter(())

    def feed(self, load: Callable[[Weights], None]) -> None:
        """Have the first rank `load`; every rank calls this, and takes part in each pass.

        Raises:
            UserError: as `load` does, on every rank.
        """
        if self._ranks.rank:
            while self._ranks.once(_is_another):
                for _ in self.weights:
                    pass
            return
        failure: UserError | None = None
        try:
            load(self)
        except UserError as error:
            failure = error
        self._complete()
        self._ranks.once(lambda: _no_more(failure))

    def shapes(self) -> list[Shape]:
        """What a pass will bring; the first time, by a pass."""
        if self._shapes is None:
            self._shapes = [Shape(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]
        return self._shapes

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass, on the first rank."""
        self._complete()
        self._ranks.once(_is_another)
        self._under_way = iter(self.weights)
        return self._under_way

    def _complete(self) -> None:
        """End the pass that an engine broke off: the others are still at it."""
        for _ in self._under_way:
            pass


def _is_another() -> bool:
    return True


def _no_more(failure: UserError | None) -> bool:
    if failure is not None:
        raise failure
    return False
