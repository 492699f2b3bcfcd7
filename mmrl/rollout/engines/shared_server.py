"""Engines whose weights come by a way of their own: where several ranks ask, or where drawing and learning overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from mmrl.distributed.ranks import Ranks
from mmrl.rollout.engines.base import Engine, Request
from mmrl.rollout.responses import Drawn
from mmrl.rollout.sharded_weight_sync import Relay
from mmrl.rollout.weight_sync import Shape, Weights


class Servers(Engine, Protocol):
    """An engine beside which others, of other processes, ask the same servers."""

    def ask_for_adapter(self) -> None:
        """Another of them has loaded an adapter: ask for it from now on."""


class FedByFirst:
    """Servers that every rank draws from, and the first rank brings weights."""

    def __init__(self, engine: Servers, ranks: Ranks) -> None:
        self._engine, self._ranks = engine, ranks
        self._relay: Relay | None = None

    def draw(self, requests: Sequence[Request]) -> list[list[Drawn]]:
        """The siblings of each of this rank's requests."""
        return self._engine.draw(requests) if requests else []

    def load(self, weights: Weights) -> None:
        """Every rank takes part in gathering. Raises as the engine does, on all."""
        if self._relay is None or self._relay.weights is not weights:
            self._relay = Relay(weights, self._ranks)
        self._relay.feed(self._engine.load)

    def load_adapter(self, folder: Path) -> None:
        """As the engine, once; every rank draws with it."""
        self._ranks.once(lambda: self._engine.load_adapter(folder))
        self._engine.ask_for_adapter()

    def rest(self) -> None:
        """As the engine, once."""
        self._ranks.once(self._engine.rest)

    def close(self) -> None:
        """Part from the servers."""
        self._engine.close()


class Remembering:
    """Servers that draw while the learner learns: one that dies then is given the weights that it had."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def draw(self, requests: Sequence[Request]) -> list[list[Drawn]]:
        """As the engine."""
        return self._engine.draw(requests)

    def load(self, weights: Weights) -> None:
        """Keep a copy in host memory, and load that. Raises as the engine does."""
        self._engine.load(_Held(weights))

    def load_adapter(self, folder: Path) -> None:
        """As the engine: nobody writes to the folder before the next sync."""
        self._engine.load_adapter(folder)

    def rest(self) -> None:
        """As the engine."""
        self._engine.rest()

    def close(self) -> None:
        """As the engine."""
        self._engine.close()


class _Held:
    """Weights as they were, in host memory; each comes back on the device that it was on."""

    def __init__(self, weights: Weights) -> None:
        self._held = {name: (tensor.detach().to("cpu", copy=True), tensor.device) for name, tensor in weights}

    def shapes(self) -> list[Shape]:
        """What a pass will bring."""
        return [Shape(name, tensor.dtype, tuple(tensor.shape)) for name, (tensor, _) in self._held.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass over them."""
        return ((name, tensor.to(device)) for name, (tensor, device) in self._held.items())
