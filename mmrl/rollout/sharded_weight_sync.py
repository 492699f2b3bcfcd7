"""Weights that several ranks hold, for an engine that the first rank alone feeds: gathered a few at a time.

Where weights are divided, a pass over them needs every rank, and only the engine knows how often it passes. So the
first rank calls the others to each pass, and tells them when there are no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mmrl.distributed.ranks import Ranks
from mmrl.rollout.weight_sync import WeightSpec, WeightStream
from mmrl.types import UserError


class ShardedWeightStream:
    """The weights as the first rank's engine takes them; no rank ever holds more of them than a pass gathers."""

    def __init__(self, weights: WeightStream, ranks: Ranks) -> None:
        self.weights, self._ranks = weights, ranks
        self._specs: list[WeightSpec] | None = None
        self._current_pass: Iterator[tuple[str, torch.Tensor]] = iter(())

    def load_on_rank0(self, load: Callable[[WeightStream], None]) -> None:
        """Have the first rank `load`; every rank calls this, and takes part in each pass.

        Raises:
            UserError: as `load` does, on every rank.
        """
        if self._ranks.rank:
            while self._ranks.on_rank0(_signal_pass):
                for _ in self.weights:
                    pass
            return
        failure: UserError | None = None
        try:
            load(self)
        except UserError as error:
            failure = error
        self._finish_pass()
        self._ranks.on_rank0(lambda: _signal_end(failure))

    def specs(self) -> list[WeightSpec]:
        """What a pass will bring; the first time, by a pass."""
        if self._specs is None:
            self._specs = [WeightSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass, on the first rank."""
        self._finish_pass()
        self._ranks.on_rank0(_signal_pass)
        self._current_pass = iter(self.weights)
        return self._current_pass

    def _finish_pass(self) -> None:
        """End the pass that an engine broke off: the others are still at it."""
        for _ in self._current_pass:
            pass


def _signal_pass() -> bool:
    return True


def _signal_end(failure: UserError | None) -> bool:
    if failure is not None:
        raise failure
    return False
