"""An engine that several ranks ask, and one feeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mmrl.ranks import Ranks
from mmrl.rollout.engine import Engine, Request
from mmrl.rollout.response import Drawn
from mmrl.rollout.weights import Shape, Weights


class Held:
    """Weights in host memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def shapes(self) -> list[Shape]:
        """What a pass will bring."""
        return [Shape(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass over them."""
        return iter(self._tensors.items())


class FedByFirst:
    """Servers that every rank draws from. The first rank gathers weights in its host memory and brings them."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self._engine, self._ranks = engine, ranks

    def draw(self, requests: Sequence[Request]) -> list[list[Drawn]]:
        """The siblings of each of this rank's requests."""
        return self._engine.draw(requests) if requests else []

    def load(self, weights: Weights) -> None:
        """Every rank takes part in gathering. Raises as the engine does, on all."""
        first = self._ranks.rank == 0
        held = {name: tensor.detach().cpu().clone() for name, tensor in weights if first}
        self._ranks.once(lambda: self._engine.load(Held(held)))

    def load_adapter(self, folder: Path) -> None:
        """As the engine, once."""
        self._ranks.once(lambda: self._engine.load_adapter(folder))

    def rest(self) -> None:
        """As the engine, once."""
        self._ranks.once(self._engine.rest)

    def close(self) -> None:
        """Part from the servers."""
        self._engine.close()
