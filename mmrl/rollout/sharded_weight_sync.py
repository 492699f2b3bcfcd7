"""Weights that are sharded over ranks, for an engine that rank 0 alone loads.

Iterating over sharded weights is a collective operation, and only the engine knows how often it iterates. So rank 0
tells the other ranks before each pass, and when there are no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mmrl.distributed.ranks import Ranks
from mmrl.rollout.weight_sync import WeightSpec, WeightStream
from mmrl.types import UserError


class ShardedWeightStream:
    """The weights as rank 0's engine reads them. A rank never holds more of them than one step of a pass gathers."""

    def __init__(self, weights: WeightStream, ranks: Ranks) -> None:
        self.weights, self._ranks = weights, ranks
        self._specs: list[WeightSpec] | None = None
        self._current_pass: Iterator[tuple[str, torch.Tensor]] = iter(())

    def load_on_rank0(self, load: Callable[[WeightStream], None]) -> None:
        """Call `load` on rank 0. Every rank must call this, and takes part in each pass over the weights.

        Raises:
            UserError: `load` raised it on rank 0; it is raised on every rank.
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
        # Each call of `on_rank0` here answers one of the loop above, where `_signal_pass` stands for whatever rank 0
        # calls: the value that rank 0 returns, or the error that it raises, is the other ranks' too.
        self._ranks.on_rank0(lambda: _signal_end(failure))

    def specs(self) -> list[WeightSpec]:
        """Return name, dtype and shape of each weight. The first call costs a pass."""
        if self._specs is None:
            self._specs = [WeightSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Start a pass on all ranks and yield name and tensor of each weight. Only rank 0 calls this."""
        self._finish_pass()
        self._ranks.on_rank0(_signal_pass)
        self._current_pass = iter(self.weights)
        return self._current_pass

    def _finish_pass(self) -> None:
        """Iterate to the end of a pass that the engine broke off, since the other ranks gather it to the end."""
        for _ in self._current_pass:
            pass


def _signal_pass() -> bool:
    return True


def _signal_end(failure: UserError | None) -> bool:
    if failure is not None:
        raise failure
    return False
