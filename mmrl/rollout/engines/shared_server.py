"""Servers that all ranks of a run generate with, and that rank 0 alone loads weights into.

Weights may be sharded over ranks. Iterating over them is then collective, one pass after the other, and only the engine
on rank 0 knows how often it iterates. So rank 0 tells the other ranks before each pass, and when there are no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mmrl.distributed.ranks import Ranks
from mmrl.rollout.engines.base import GenerationRequest
from mmrl.rollout.responses import GeneratedTokens
from mmrl.rollout.weight_sync import WeightSpec, WeightStream
from mmrl.types import UserError

if TYPE_CHECKING:
    from mmrl.rollout.engines.vllm_server import ServerEngine


class SharedServer:
    """One rank's client of servers that all ranks share."""

    def __init__(self, engine: ServerEngine, ranks: Ranks) -> None:
        self._engine, self._ranks = engine, ranks

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[GeneratedTokens]]:
        """Return the continuations of each of this rank's requests, in order. There may be none."""
        return self._engine.generate(requests) if requests else []

    def load_weights(self, weights: WeightStream) -> None:
        """Load weights through rank 0. All ranks must call this, since they gather the weights together.

        Raises:
            UserError: they are another model's; raised on every rank.
        """
        ShardedWeightStream(weights, self._ranks).load_on_rank0(self._engine.load_weights)

    def load_adapter(self, folder: Path) -> None:
        """Load the adapter through rank 0, and request it on every rank from now on."""
        self._ranks.on_rank0(partial(self._engine.load_adapter, folder))
        self._engine.use_adapter()

    def sleep(self) -> None:
        """Put the servers to sleep through rank 0."""
        self._ranks.on_rank0(self._engine.sleep)

    def close(self) -> None:
        """Close this rank's client."""
        self._engine.close()


class ShardedWeightStream(WeightStream):
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
            while self._ranks.on_rank0(lambda: True):
                for _ in self.weights:
                    pass
            return
        failure: UserError | None = None
        try:
            load(self)
        except UserError as error:
            failure = error
        self._finish_pass()

        def report_end() -> bool:
            if failure is not None:
                raise failure
            return False

        # Each `on_rank0` of rank 0 meets one in the loop above, whose own function does not run: True from rank 0 means
        # one more pass, False the end, and an error that rank 0 raises here is raised on every rank.
        self._ranks.on_rank0(report_end)

    def specs(self) -> list[WeightSpec]:
        """Return name, dtype and shape of each weight. The first call costs a pass."""
        if self._specs is None:
            self._specs = super().specs()
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Start a pass on all ranks and yield name and tensor of each weight. Only rank 0 calls this."""
        self._finish_pass()
        self._ranks.on_rank0(lambda: True)
        self._current_pass = iter(self.weights)
        return self._current_pass

    def _finish_pass(self) -> None:
        # The engine may have broken a pass off, and the other ranks gather it to the end.
        for _ in self._current_pass:
            pass
