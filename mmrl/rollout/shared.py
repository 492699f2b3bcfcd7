"""An engine that several ranks ask, and one feeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmrl.ranks import Ranks
from mmrl.rollout.engine import Drawn, Engine, Request
from mmrl.rollout.relay import Relay
from mmrl.rollout.weights import Weights


class FedByFirst:
    """Servers that every rank draws from, and the first rank brings weights."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
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
        """As the engine, once."""
        self._ranks.once(lambda: self._engine.load_adapter(folder))

    def rest(self) -> None:
        """As the engine, once."""
        self._ranks.once(self._engine.rest)

    def close(self) -> None:
        """Part from the servers."""
        self._engine.close()
