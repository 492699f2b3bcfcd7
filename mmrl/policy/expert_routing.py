"""Records the experts that routers send tokens to, and replays recorded routes.

A router picks the `top_k` experts with the largest probability for each token. Where two are close, rounding or one
update of the weights picks another, and the token's log-prob jumps. Routing replay sends each token to the experts that
were picked before: by the learner itself (R2), or by the rollout engine (R3), which rounds differently. The outputs
of these experts are still weighted by the current router's probabilities, so the router learns.

Source: R2 and R3 ("vanilla" and "rollout routing replay") of arXiv:2512.01374, section 3.3, and arXiv:2510.11370.

Letters in shapes: X router layers, T tokens of a batch, N some of them, E experts, K experts of a token, S
sums (E + 1).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from mmrl.types import Author, Experience, ExpertRoutes, UserError
from mmrl.utils.torch_transfer import send

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNKNOWN_EXPERT = -1  # marks a token without routes, whose experts the router chooses itself

_MAX_BYTE = 255


class RoutePiece(NamedTuple):
    """Routes of consecutive tokens, and their place in a batch."""

    column: int  # index of the first of the tokens in the flattened batch
    num_tokens: int  # number of the tokens; `routes` may cover fewer, or further ones that are not in the batch
    routes: ExpertRoutes


class RouteDifferences(NamedTuple):
    """Counts of tokens that the routers themselves would have sent to other experts than the replayed ones."""

    tokens: int  # tokens with routes
    differing_tokens: int  # tokens that differ in some layer
    differing_choices: int  # pairs of a token and a layer that differ


class RoutingSummary(NamedTuple):
    """Spread of tokens over experts, as means over layers."""

    load_entropy: float  # entropy of the experts' shares of tokens, over that of equal shares: 1 if all are equal
    margin: float  # mean distance, in probability, from the last expert that is picked to the first that is not


def install_expert_routing(model: PreTrainedModel) -> None:
    """Let each router of the model record where it sends tokens, and replay what `set_routes` gives it."""
    for router in find_routers(model):
        router.replayed_routes = None  # experts that tokens are sent to, int64 [T, K]; None lets the router choose
        router.own_routes = None  # experts that it would have chosen in the last forward, int64 [T, K]
        router.last_routes = None  # experts that tokens went to in the last forward, int64 [T, K]
        router.last_margins = None  # of the last forward with gradients, float [T]: see `RoutingSummary.margin`
        router.forward = _forward.__get__(router)


def find_routers(model: PreTrainedModel) -> list[Any]:
    """Return the routers of the model, in the order of its layers; none if it has no experts."""
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def router_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the indexes of the language model's layers that have a router."""
    routers = set(map(id, find_routers(model)))
    names = [name for name, module in model.named_modules() if id(module) in routers]
    return tuple(int(re.findall(r"\.layers\.(\d+)\.", name)[-1]) for name in names)


def set_routes(routers: Sequence[Any], routes_XTK: torch.Tensor | None) -> None:
    """Send the tokens of the next forward passes to these experts, numbers of any integer type.

    With None, or `UNKNOWN_EXPERT` for all experts of a token, the routers choose. Routes stay set after a forward,
    because a layer that is recomputed in the backward pass needs the same ones.
    """
    if routers and routes_XTK is not None:
        routes_XTK = send(routes_XTK, routers[0].weight.device, torch.int64)
    for layer, router in enumerate(routers):
        router.replayed_routes = None if routes_XTK is None else routes_XTK[layer]


def get_routes(routers: Sequence[Any]) -> torch.Tensor:
    """Return the experts that each token of the last forward pass went to, int64 [X, T, K]."""
    return torch.stack([router.last_routes for router in routers])


def sum_routing(routers: Sequence[Any], tokens_N: torch.Tensor) -> torch.Tensor:
    """Return the sums that `summarize_routing` takes, over these tokens of the last forward with gradients enabled.

    To summarize several passes, add up their sums. A token that is listed twice counts twice.

    Returns:
        For each layer the number of tokens that each expert got, followed by the sum of the tokens' margins, on
        the device of the routers, float64 [X, E + 1].
    """
    sums = []
    tokens_N = send(tokens_N, routers[0].last_routes.device)
    for router in routers:
        chosen = router.last_routes[tokens_N].flatten()
        # Not `bincount`, which makes the CPU wait for the largest number.
        loads_E = torch.zeros(router.num_experts, dtype=torch.float64, device=chosen.device)
        loads_E = loads_E.index_add(0, chosen, torch.ones_like(chosen, dtype=torch.float64))
        margin_1 = router.last_margins[tokens_N].double().sum(dim=0, keepdim=True)
        sums.append(torch.cat([loads_E, margin_1]))
    return torch.stack(sums)


def summarize_routing(routers: Sequence[Any], sums_XS: torch.Tensor) -> RoutingSummary:
    """Summarize the sums that `sum_routing` returned for at least one token."""
    loads_XE, margins_X = sums_XS[:, :-1], sums_XS[:, -1]
    choices_X = loads_XE.sum(dim=-1)
    entropies_X = torch.special.entr(loads_XE / choices_X[:, None]).sum(dim=-1)
    margin = (margins_X / choices_X).mean() * routers[0].top_k
    return RoutingSummary(float(entropies_X.mean()) / math.log(loads_XE.shape[1]), float(margin))


def count_differences(routers: Sequence[Any], routes_XTK: torch.Tensor, tokens_N: torch.Tensor) -> RouteDifferences:
    """Compare routes that were replayed in the last forward pass with what the routers themselves would have chosen.

    Only these tokens are compared; one that is listed twice counts twice. Each layer's inputs come from layers that
    followed the routes. The order of a token's experts does not count.
    """
    own_XTK = torch.stack([router.own_routes for router in routers])
    tokens_N = send(tokens_N, own_XTK.device)
    own_XNK, routes_XNK = own_XTK[:, tokens_N], send(routes_XTK, own_XTK.device, own_XTK.dtype)[:, tokens_N]
    known_N = routes_XNK[0, :, 0] != UNKNOWN_EXPERT
    differs_XNK = own_XNK.sort(dim=-1).values != routes_XNK.sort(dim=-1).values
    differs_XN = differs_XNK.any(dim=-1) & known_N
    counts = (known_N.sum(), differs_XN.any(dim=0).sum(), differs_XN.sum())
    return RouteDifferences(*torch.stack(counts).tolist())


def encode_routes(routes_TXK: torch.Tensor | np.ndarray[Any, Any], num_experts: int) -> ExpertRoutes:
    """Return routes [T, X, K] with one byte for each expert's number, or two if `num_experts` needs them."""
    num_bytes = 1 if num_experts <= _MAX_BYTE + 1 else 2
    _, num_layers, experts_per_token = routes_TXK.shape
    return ExpertRoutes(
        expert_ids=np.asarray(routes_TXK).astype(f"<u{num_bytes}").tobytes(),
        num_layers=num_layers,
        experts_per_token=experts_per_token,
        bytes_per_id=num_bytes,
    )


def with_routes_of_row(routers: Sequence[Any], groups: Sequence[Sequence[Experience]]) -> list[list[Experience]]:
    """Return the experiences with the routes of the last forward, which ran them as one packed row."""
    routes = encode_routes(get_routes(routers).transpose(0, 1).cpu(), routers[0].num_experts)
    routed_groups = []
    end = 0
    for group in groups:
        start, end = end, end + len(group[0].rollout.prompt.token_ids)
        prompt_routes = routes.cut(start, end)
        routed = []
        for experience in group:
            segments = []
            for segment in experience.rollout.segments:
                start, end = end, end + len(segment.token_ids)
                segments.append(replace(segment, routes=routes.cut(start, end)))
            rollout = replace(experience.rollout, segments=tuple(segments), prompt_routes=prompt_routes)
            routed.append(replace(experience, rollout=rollout))
        routed_groups.append(routed)
    return routed_groups


def place_routes(pieces: Iterable[RoutePiece], num_tokens: int) -> torch.Tensor:
    """Return the routes of a batch of `num_tokens` tokens, int16 [X, T, K]; `UNKNOWN_EXPERT` where no piece has any.

    Raises:
        UserError: the pieces are of different models.
    """
    pieces = list(pieces)
    shapes = {(piece.routes.num_layers, piece.routes.experts_per_token) for piece in pieces}
    if len(shapes) > 1:
        raise UserError(
            f"loss.routing_replay: rollouts have routes of {sorted(shapes)} (layers, experts of a token), so different "
            "models sampled them; start the run again"
        )
    num_layers, experts_per_token = shapes.pop()
    routes_TXK = np.full((num_tokens, num_layers, experts_per_token), UNKNOWN_EXPERT, dtype=np.int16)
    for column, length, routes in pieces:
        numbers = np.frombuffer(routes.expert_ids, dtype=f"<u{routes.bytes_per_id}")
        known_TXK = numbers.reshape(-1, num_layers, experts_per_token)[:length]
        routes_TXK[column : column + len(known_TXK)] = known_TXK
    return torch.from_numpy(routes_TXK).transpose(0, 1)


def check_routes(routers: Sequence[Any], routes_XTK: torch.Tensor) -> None:
    """Check that these routers can follow the routes.

    Raises:
        UserError: the routes have another number of layers or of experts per token, or an expert that the model lacks.
    """
    expected = (len(routers), routers[0].top_k if routers else 0)
    found = (routes_XTK.shape[0], routes_XTK.shape[2])
    if found != expected:
        raise UserError(
            f"loss.routing_replay: engine: the rollout engine routes tokens to {found[1]} experts in each of "
            f"{found[0]} layers, and the policy to {expected[1]} in each of {expected[0]}; start the engine with the "
            "model that is trained"
        )
    smallest, largest = torch.stack(routes_XTK.aminmax()).tolist()
    if smallest < UNKNOWN_EXPERT:
        largest = smallest + 2**16  # numbers of two bytes, from 32,768 on, are negative as int16
    num_experts = routers[0].num_experts
    if largest >= num_experts:
        raise UserError(
            f"loss.routing_replay: engine: the rollout engine names expert {largest}, and the policy has experts 0 to "
            f"{num_experts - 1}; start the engine with the model that is trained"
        )


def check_routes_recorded(experiences: Sequence[Experience]) -> None:
    """Check that the engine recorded routes of the rollouts that were sampled for this step.

    Raises:
        UserError: a rollout has no routes.
    """
    for experience in experiences:
        rollout = experience.rollout
        sampled = [segment for segment in rollout.segments if segment.author is Author.POLICY]
        if experience.staleness == 0 and sampled and all(segment.routes is None for segment in sampled):
            raise UserError(
                f"loss.routing_replay: engine: the rollout engine recorded no routes of sample "
                f"{rollout.prompt.sample.id}; start servers with --enable-return-routed-experts (docs/vllm.md), "
                "or fill in `routes` in your own engine; or set loss.routing_replay: learner"
            )


def _forward(router: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # noqa: ANN401
    """Return the logits [T, E] of a router, and the weights and numbers [T, K] of the experts of each token.

    Own routes, routes and margins are recorded in the router.
    """
    logits_TE = F.linear(hidden_states.reshape(-1, router.hidden_dim), router.weight)
    probabilities_TE = F.softmax(logits_TE, dtype=torch.float, dim=-1)
    routes_TK = probabilities_TE.topk(router.top_k, dim=-1).indices
    router.own_routes = routes_TK
    if router.replayed_routes is not None:
        routes_TK = torch.where(router.replayed_routes == UNKNOWN_EXPERT, routes_TK, router.replayed_routes)
    # Gathered from all probabilities: replayed experts that the router would not pick need a gradient too.
    weights_TK = probabilities_TE.gather(-1, routes_TK)
    weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    router.last_routes = routes_TK
    if torch.is_grad_enabled():
        largest = probabilities_TE.detach().topk(min(router.top_k + 1, router.num_experts)).values
        router.last_margins = largest[:, router.top_k - 1] - largest[:, -1]
    return logits_TE, weights_TK.to(logits_TE.dtype), routes_TK
