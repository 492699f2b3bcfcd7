"""Routers of experts: which experts tokens went to, and sending tokens to given experts again.

A router picks the `top_k` experts with the largest probability for each token. Where two are close, rounding or one
update of the weights picks another, and the token's log-prob jumps. Routing replay sends each token to the experts that
were picked before. The weights that their outputs are added up with are the current router's, so it still learns.

Source: R2 and R3 ("vanilla" and "rollout routing replay") of arXiv:2512.01374, section 3.3, and arXiv:2510.11370.

Letters in shapes: X router layers, T tokens of a batch, E experts, K experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RoutingSummary(NamedTuple):
    """Spread of tokens over experts in the last forward pass that had a gradient, as means over layers."""

    load_entropy: float
    """Entropy of the shares of tokens that experts got, over that of equal shares: 1 if all got equally many."""
    margin: float
    """Mean distance, in probability, from the last expert that is picked to the first that is not."""


def install_expert_routing(model: PreTrainedModel) -> None:
    """Let each router of the model record where it sends tokens, and replay what `set_routes` gives it."""
    for router in find_routers(model):
        router.replayed_routes, router.last_routes, router.last_summary = None, None, None
        router.forward = _forward.__get__(router)


def find_routers(model: PreTrainedModel) -> list[Any]:
    """Return the routers of the model, in the order of its layers; none if it has no experts."""
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def set_routes(routers: Sequence[Any], routes_XTK: torch.Tensor | None) -> None:
    """Send the tokens of the next forward passes to these experts, int64; None leaves it to the routers.

    They stay set, since a layer that is recomputed in the backward pass must find the routes of its forward.
    """
    for layer, router in enumerate(routers):
        router.replayed_routes = None if routes_XTK is None else routes_XTK[layer]


def get_routes(routers: Sequence[Any]) -> torch.Tensor:
    """Return the experts that each token of the last forward pass went to, int64 [X, T, K]."""
    return torch.stack([router.last_routes for router in routers])


def summarize_routing(routers: Sequence[Any]) -> RoutingSummary:
    """Summarize the last forward pass that had a gradient."""
    summary_X2 = torch.stack([router.last_summary for router in routers])
    return RoutingSummary(*summary_X2.mean(dim=0).tolist())


def _forward(router: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # noqa: ANN401
    """Return the logits [T, E] of a router, and the weights and numbers [T, K] of the experts of each token."""
    logits_TE = F.linear(hidden_states.reshape(-1, router.hidden_dim), router.weight)
    probabilities_TE = F.softmax(logits_TE, dtype=torch.float, dim=-1)
    routes_TK = router.replayed_routes
    if routes_TK is None:
        routes_TK = probabilities_TE.topk(router.top_k, dim=-1).indices
    # Gathered from all probabilities: those of experts that the router itself would not pick have a gradient too.
    weights_TK = probabilities_TE.gather(-1, routes_TK)
    weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    router.last_routes = routes_TK
    if torch.is_grad_enabled():
        router.last_summary = _summarize(probabilities_TE.detach(), routes_TK)
    return logits_TE, weights_TK.to(logits_TE.dtype), routes_TK


def _summarize(probabilities_TE: torch.Tensor, routes_TK: torch.Tensor) -> torch.Tensor:
    """Return the fields of `RoutingSummary` for one layer, float32 [2]."""
    num_experts, top_k = probabilities_TE.shape[1], routes_TK.shape[1]
    shares_E = torch.bincount(routes_TK.flatten(), minlength=num_experts) / routes_TK.numel()
    load_entropy = torch.special.entr(shares_E).sum() / math.log(num_experts)
    largest = probabilities_TE.topk(min(top_k + 1, num_experts)).values
    return torch.stack([load_entropy, (largest[:, top_k - 1] - largest[:, -1]).mean()])
