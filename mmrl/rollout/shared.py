"""An engine whose weights come from host memory: several ranks ask it, or it draws while the learner learns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from mmrl.ranks import Ranks
from mmrl.rollout.engine import Engine, Request
from mmrl.rollout.response import Drawn
from mmrl.rollout.weights import Shape, Weights


class Held:
    """Weights as they were, in host memory; each comes back on the device that it was on."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._held = {name: (tensor.detach().to("cpu", copy=True), tensor.device) for name, tensor in weights}

    def shapes(self) -> list[Shape]:
        """What a pass will bring."""
        return [Shape(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass over them."""
        return ((name, tensor.to(device)) for name, (tensor, device) in self._held.items())


class FedByFirst:
    """Servers that every rank draws from. The first rank gathers weights in its host memory and brings them.

    There they stay: a server that dies while the learner learns is given the same again.
    """

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self._engine, self._ranks = engine, ranks

    def draw(self, requests: Sequence[Request]) -> list[list[Drawn]]:
        """The siblings of each of this rank's requests."""
        return self._engine.draw(requests) if requests else []

    def load(self, weights: Weights) -> None:
        """Every rank takes part in gathering. Raises as the engine does, on all."""
        first = self._ranks.rank == 0
        held = Held(pair for pair in weights if first)  # what is sharded is gathered by all
        self._ranks.once(lambda: self._engine.load(held))

    def load_adapter(self, folder: Path) -> None:
        """As the engine, once."""
        self._ranks.once(lambda: self._engine.load_adapter(folder))

    def rest(self) -> None:
        """As the engine, once."""
        self._ranks.once(self._engine.rest)

    def close(self) -> None:
        """Part from the servers."""
        self._engine.close()
