"""Attention in a packed row: every prompt once, and each of its completions sees it and itself.

    prompt | first | second second | prompt' | first' ...

On a CPU no mask is made. What a group may see is a few rectangles and triangles, each a call of the flash kernel, and
parts that share queries are merged by their log-sum-exps in float32. The flash backward derives a part's
probabilities from the log-sum-exp it is given; given the merged one, its gradients are those of the whole.
CUDA has FlexAttention, which skips the blocks that a mask empties.

Letters: T tokens of the row, D channels of a head, H query heads, K key heads, G = H / K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mmrl.policy.batch import PrefixGroup
from mmrl.types import UserError

ATTENTION_NAME = "mmrl_tree"
PrefixTree = tuple[PrefixGroup, ...]

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def install_shared_prefix_attention(model: PreTrainedModel) -> None:
    """Let the language model attend along the `tree` its forward is given, and as SDPA does where none is.

    For good: a layer recomputed in the backward pass must find what its forward found. The mask function keeps
    transformers from dropping the padding mask of ordinary calls.
    """
    AttentionInterface.register(ATTENTION_NAME, shared_prefix_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    model.get_decoder().config._attn_implementation = ATTENTION_NAME


def shared_prefix_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    prefix_tree: PrefixTree | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: query [1, H, T, D], key and value [1, K, T, D], output [1, T, H, D].

    Raises:
        UserError: the layer attends within a sliding window only.
    """
    if prefix_tree is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return output, None
    if options.get("sliding_window"):
        raise UserError(
            "shared_prefix: the model attends within a sliding window, which a shared prompt cannot; use off"
        )
    if query.is_cuda:
        return _flex_attention(query, key, value, AttentionPlan(prefix_tree, scaling)), None
    merged: torch.Tensor = _BlockwiseAttention.apply(query, key, value, AttentionPlan(prefix_tree, scaling))  # type: ignore[no-untyped-call]
    return merged, None


class AttentionBlock(NamedTuple):
    """Queries that see these keys: all of them, or up to their own place. A span that joins shares its queries with
    one before it.
    """

    queries: slice
    keys: slice
    causal: bool
    merges: bool


def attention_blocks(prefix_tree: PrefixTree) -> Iterator[AttentionBlock]:
    """What is visible in a packed row, in disjoint parts; the first to name a query does not join."""
    start = 0
    for prompt, completions in prefix_tree:
        end = start + prompt + sum(completions)
        if len(completions) < 2:  # nothing is shared: one sequence
            yield AttentionBlock(slice(start, end), slice(start, end), causal=True, merges=False)
        else:
            trunk = slice(start, start + prompt)
            yield AttentionBlock(trunk, trunk, causal=True, merges=False)
            yield AttentionBlock(slice(trunk.stop, end), trunk, causal=False, merges=False)
            for first, last in pairwise(accumulate(completions, initial=trunk.stop)):
                yield AttentionBlock(slice(first, last), slice(first, last), causal=True, merges=True)
        start = end


class AttentionPlan(NamedTuple):
    """Along which tree to attend, and what scores are multiplied by."""

    prefix_tree: PrefixTree
    scaling: float


class _AttentionContext(BackwardCFunction):
    plan: AttentionPlan


class _BlockwiseAttention(torch.autograd.Function):
    """The union of all spans. Query heads that share a key head stand in the kernel's batch, so no key is copied."""

    @staticmethod
    def forward(
        ctx: _AttentionContext, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        q, k, v = _group_by_key_head(query, key, value)
        groups, heads, length, width = q.shape
        merged = torch.empty(length, heads, groups, width, device=q.device)
        out, lse = merged.permute(2, 1, 0, 3), torch.empty(groups, heads, length, device=q.device)
        for span in attention_blocks(plan.prefix_tree):
            at = (..., span.queries, slice(None))
            part, part_lse = _flash_forward(
                q[at], k[..., span.keys, :], v[..., span.keys, :], 0.0, span.causal, scale=plan.scaling
            )
            if not span.merges:
                out[at], lse[..., span.queries] = part, part_lse
                continue
            before = lse[..., span.queries]
            both = torch.logaddexp(before, part_lse)
            out[at] = out[at] * (before - both).exp().unsqueeze(-1) + part * (part_lse - both).exp().unsqueeze(-1)
            lse[..., span.queries] = both
        merged = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, merged, lse)
        ctx.plan = plan
        return merged.view(1, length, heads * groups, width)

    @staticmethod
    def backward(ctx: _AttentionContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
        query, key, value, merged, lse = saved
        q, k, v = _group_by_key_head(query, key, value)
        out, d_out = (x.reshape(merged.shape).permute(2, 1, 0, 3) for x in (merged, grad))
        d_query = torch.zeros(merged.shape, device=q.device)
        d_q = d_query.permute(2, 1, 0, 3)
        d_k, d_v = (torch.zeros(key.shape, device=q.device) for _ in range(2))
        for span in attention_blocks(ctx.plan.prefix_tree):
            at, keys = (..., span.queries, slice(None)), (..., span.keys, slice(None))
            part_q, part_k, part_v = _flash_backward(
                d_out[at],
                q[at],
                k[keys],
                v[keys],
                out[at],
                lse[..., span.queries],
                0.0,
                span.causal,
                scale=ctx.plan.scaling,
            )
            d_q[at] += part_q
            d_k[keys] += part_k.sum(dim=0)
            d_v[keys] += part_v.sum(dim=0)
        d_query = d_query.view(query.shape[2], query.shape[1], -1).transpose(0, 1).unsqueeze(0)
        return d_query.to(query.dtype), d_k.to(key.dtype), d_v.to(value.dtype), None


def _group_by_key_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[1, H, T, D] becomes [G, K, T, D], keys and values as views."""
    heads = key.shape[1]
    groups = query.shape[1] // heads
    by_key = query[0].view(heads, groups, *query.shape[2:])
    return by_key.transpose(0, 1), key.expand(groups, -1, -1, -1), value.expand(groups, -1, -1, -1)


def _flex_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    mask = build_block_mask(plan.prefix_tree, query.device)
    output: torch.Tensor = _compiled_flex_attention()(
        query, key, value, block_mask=mask, scale=plan.scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous()


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


@lru_cache(maxsize=2)  # every layer of a forward pass asks for the same
def build_block_mask(prefix_tree: PrefixTree, device: torch.device) -> BlockMask:
    """The spans as FlexAttention wants them."""
    own, trunk = _piece_labels(prefix_tree)
    own_T, trunk_T = torch.tensor(own, device=device), torch.tensor(trunk, device=device)

    def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q >= k) & ((own_T[q] == own_T[k]) | (trunk_T[q] == own_T[k]))

    return create_block_mask(visible, None, None, len(own), len(own), device=str(device))


def _piece_labels(prefix_tree: PrefixTree) -> tuple[list[int], list[int]]:
    """For each token the number of its piece (a prompt or a completion), and that of its prompt."""
    own: list[int] = []
    trunk: list[int] = []
    piece = 0
    for prompt, completions in prefix_tree:
        first = piece
        for length in (prompt, *completions):
            own += [piece] * length
            trunk += [first] * length
            piece += 1
    return own, trunk
