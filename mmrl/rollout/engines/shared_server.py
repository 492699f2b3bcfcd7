"""Engines whose weights come by a way of their own: where several ranks ask, or where drawing and learning overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from mmrl.distributed.ranks import Ranks
from mmrl.rollout.engines.base import GenerationRequest, RolloutEngine
from mmrl.rollout.responses import GeneratedTokens
from mmrl.rollout.sharded_weight_sync import ShardedWeightStream
from mmrl.rollout.weight_sync import WeightSpec, WeightStream


class MultiClientEngine(RolloutEngine, Protocol):
    """An engine beside which others, of other processes, ask the same servers."""

    def use_adapter(self) -> None:
        """Another of them has loaded an adapter: ask for it from now on."""


class SharedServer:
    """Servers that every rank draws from, and the first rank brings weights."""

    def __init__(self, engine: MultiClientEngine, ranks: Ranks) -> None:
        self._engine, self._ranks = engine, ranks
        self._weight_stream: ShardedWeightStream | None = None

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[GeneratedTokens]]:
        """The siblings of each of this rank's requests."""
        return self._engine.generate(requests) if requests else []

    def load_weights(self, weights: WeightStream) -> None:
        """Every rank takes part in gathering. Raises as the engine does, on all."""
        if self._weight_stream is None or self._weight_stream.weights is not weights:
            self._weight_stream = ShardedWeightStream(weights, self._ranks)
        self._weight_stream.load_on_rank0(self._engine.load_weights)

    def load_adapter(self, folder: Path) -> None:
        """As the engine, once; every rank draws with it."""
        self._ranks.on_rank0(lambda: self._engine.load_adapter(folder))
        self._engine.use_adapter()

    def sleep(self) -> None:
        """As the engine, once."""
        self._ranks.on_rank0(self._engine.sleep)

    def close(self) -> None:
        """Part from the servers."""
        self._engine.close()


class RestartableEngine:
    """Servers that draw while the learner learns: one that dies then is given the weights that it had."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[GeneratedTokens]]:
        """As the engine."""
        return self._engine.generate(requests)

    def load_weights(self, weights: WeightStream) -> None:
        """Keep a copy in host memory, and load that. Raises as the engine does."""
        self._engine.load_weights(_HostWeightCopy(weights))

    def load_adapter(self, folder: Path) -> None:
        """As the engine: nobody writes to the folder before the next sync."""
        self._engine.load_adapter(folder)

    def sleep(self) -> None:
        """As the engine."""
        self._engine.sleep()

    def close(self) -> None:
        """As the engine."""
        self._engine.close()


class _HostWeightCopy:
    """Weights as they were, in host memory; each comes back on the device that it was on."""

    def __init__(self, weights: WeightStream) -> None:
        self._tensors = {name: (tensor.detach().to("cpu", copy=True), tensor.device) for name, tensor in weights}

    def specs(self) -> list[WeightSpec]:
        """What a pass will bring."""
        return [WeightSpec(name, tensor.dtype, tuple(tensor.shape)) for name, (tensor, _) in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass over them."""
        return ((name, tensor.to(device)) for name, (tensor, device) in self._tensors.items())
