"""Servers that all ranks of a run generate with, and that rank 0 loads weights into."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from mmrl.distributed.ranks import Ranks
from mmrl.rollout.engines.base import GenerationRequest, RolloutEngine
from mmrl.rollout.responses import GeneratedTokens
from mmrl.rollout.sharded_weight_sync import ShardedWeightStream
from mmrl.rollout.weight_sync import WeightStream


class MultiClientEngine(RolloutEngine, Protocol):
    """A client of servers that other processes are clients of, too."""

    def use_adapter(self) -> None:
        """Request the adapter from now on; another process has loaded it into the servers."""


class SharedServer:
    """One rank's client of servers that all ranks share."""

    def __init__(self, engine: MultiClientEngine, ranks: Ranks) -> None:
        self._engine, self._ranks = engine, ranks
        self._weight_stream: ShardedWeightStream | None = None

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[GeneratedTokens]]:
        """Return the continuations of each of this rank's requests, in order. There may be none."""
        return self._engine.generate(requests) if requests else []

    def load_weights(self, weights: WeightStream) -> None:
        """Load weights through rank 0. All ranks must call this, since they gather the weights together.

        Raises:
            UserError: they are another model's; raised on every rank.
        """
        if self._weight_stream is None or self._weight_stream.weights is not weights:
            self._weight_stream = ShardedWeightStream(weights, self._ranks)
        self._weight_stream.load_on_rank0(self._engine.load_weights)

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
