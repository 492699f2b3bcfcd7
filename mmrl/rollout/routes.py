"""Routes of experts: recorded while transformers runs a model.

Letters in shapes: X router layers, R rows, S columns, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmrl.policy.expert_routing import encode_routes, get_routes
from mmrl.types import ExpertRoutes


class RouteRecorder:
    """Collects where the forward passes of a batch of rollouts send their tokens."""

    def __init__(self, routers: Sequence[Any]) -> None:
        """Record for rollouts of a model with these routers."""
        self._routers = routers
        self._prompt_routes: list[ExpertRoutes] = []
        self._pieces: list[list[torch.Tensor]] = []

    def record_prompts(self, keep_BP: torch.Tensor, prompt_of_R: torch.Tensor) -> None:
        """Record the last pass, over padded prompts; `prompt_of_R` is the row of each rollout's prompt."""
        of_prompts = [self._encode([piece]) for piece in self._split(keep_BP)]
        self._prompt_routes = [of_prompts[row] for row in prompt_of_R.tolist()]
        self._pieces = [[] for _ in self._prompt_routes]

    def record(self, rows: Sequence[int], keep_RS: torch.Tensor) -> None:
        """Record the last pass, over tokens of these rollouts; `keep_RS` is 0 for padding."""
        for row, piece in zip(rows, self._split(keep_RS), strict=True):
            self._pieces[row].append(piece)

    def routes_of(self, row: int) -> tuple[ExpertRoutes, ExpertRoutes]:
        """Return the routes of a rollout's prompt, one object for its siblings too, and of what was read after it."""
        return self._prompt_routes[row], self._encode(self._pieces[row])

    def _split(self, keep_RS: torch.Tensor) -> list[torch.Tensor]:
        """Return the routes of each row of the last pass without padding, [tokens, X, K]."""
        routes_XRSK = get_routes(self._routers).cpu().view(-1, *keep_RS.shape, self._routers[0].top_k)
        routes_RSXK = routes_XRSK.permute(1, 2, 0, 3)
        return [routes_SXK[keep_S] for routes_SXK, keep_S in zip(routes_RSXK, keep_RS.bool().cpu(), strict=True)]

    def _encode(self, pieces: Sequence[torch.Tensor]) -> ExpertRoutes:
        router = self._routers[0]
        # A response whose first token ended it has no piece: the engine has read none of its tokens.
        empty = torch.zeros(0, len(self._routers), router.top_k, dtype=torch.int64)
        return encode_routes(torch.cat([empty, *pieces]), router.num_experts)
