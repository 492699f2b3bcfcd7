"""Attention in a packed row, where the completions of a group share one copy of their prompt.

    prompt | first | second second | prompt' | first' ...

A completion attends to its prompt and to itself. On a CPU no mask is made: the visible part of a group consists of a
few rectangles and triangles, each a call of the flash kernel, and parts that share queries are merged by their
log-sum-exps in float32. CUDA has FlexAttention, which skips the blocks that a mask empties.

Letters in shapes: T tokens of the row, D channels of a head, H query heads, K key heads, G = H / K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from mmrl.policy.batch import PrefixGroup
from mmrl.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_NAME = "mmrl_shared_prefix"
PrefixTree = tuple[PrefixGroup, ...]

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class AttentionBlock(NamedTuple):
    """Queries that attend to these keys."""

    queries: slice
    keys: slice
    causal: bool
    """True: each query sees the keys up to its own place. False: all keys."""
    merges: bool
    """True if an earlier block had the same queries: the two outputs are to be merged."""


class AttentionPlan(NamedTuple):
    """Arguments of the attention that are not tensors."""

    prefix_tree: PrefixTree
    scaling: float
    """Factor of query-key products."""


def install_shared_prefix_attention(model: PreTrainedModel) -> None:
    """Let the language model attend along the `prefix_tree` given to its forward, and as SDPA does without one.

    It stays installed: a layer recomputed in the backward pass must find the attention of its forward.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, shared_prefix_attention)
    # Without a mask function of this name, transformers drops the padding mask of ordinary calls.
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
    """Attend, as an attention function of transformers; return the output [1, T, H, D] and no probabilities.

    Args:
        module: the attention layer; read only without a prefix tree.
        query: queries [1, H, T, D], float32 or bfloat16.
        key: keys [1, K, T, D].
        value: values [1, K, T, D].
        attention_mask: mask for rows without a prefix tree.
        scaling: factor of query-key products.
        prefix_tree: lengths of the prompts and completions in the row; None for ordinary rows.
        **options: transformers' other arguments.

    Raises:
        UserError: the layer attends within a sliding window only.
    """
    if prefix_tree is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return output, None
    if options.get("sliding_window"):
        raise UserError(
            "shared_prefix: the model attends within a sliding window, which a shared prompt cannot; use off"
        )
    if query.is_cuda:
        mask = build_block_mask(prefix_tree, query.device)
        flex: torch.Tensor = _compiled_flex_attention()(
            query, key, value, block_mask=mask, scale=scaling, enable_gqa=True
        )
        return flex.transpose(1, 2).contiguous(), None
    plan = AttentionPlan(prefix_tree, scaling)
    merged: torch.Tensor = _BlockwiseAttention.apply(query, key, value, plan)  # type: ignore[no-untyped-call]
    return merged, None


def attention_blocks(prefix_tree: PrefixTree) -> Iterator[AttentionBlock]:
    """Yield disjoint blocks that cover what is visible in a packed row; the first with a query does not merge."""
    start = 0
    for prompt_length, completion_lengths in prefix_tree:
        end = start + prompt_length + sum(completion_lengths)
        if len(completion_lengths) < 2:
            # Nothing is shared, so the group is one sequence.
            yield AttentionBlock(slice(start, end), slice(start, end), causal=True, merges=False)
        else:
            prompt = slice(start, start + prompt_length)
            yield AttentionBlock(prompt, prompt, causal=True, merges=False)
            yield AttentionBlock(slice(prompt.stop, end), prompt, causal=False, merges=False)
            for first, last in pairwise(accumulate(completion_lengths, initial=prompt.stop)):
                yield AttentionBlock(slice(first, last), slice(first, last), causal=True, merges=True)
        start = end


@lru_cache(maxsize=2)  # every layer of a forward pass asks for the same
def build_block_mask(prefix_tree: PrefixTree, device: torch.device) -> BlockMask:
    """Return the mask of a packed row for FlexAttention."""
    # The number of each token's piece, a prompt or a completion, and that of its prompt.
    pieces: list[int] = []
    prompt_pieces: list[int] = []
    next_piece = 0
    for prompt_length, completion_lengths in prefix_tree:
        prompt_piece = next_piece
        for length in (prompt_length, *completion_lengths):
            pieces += [next_piece] * length
            prompt_pieces += [prompt_piece] * length
            next_piece += 1
    piece_T, prompt_piece_T = torch.tensor(pieces, device=device), torch.tensor(prompt_pieces, device=device)

    def is_visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return True where a query sees a key, bool in the shape of their places in the row."""
        same_piece, own_prompt = piece_T[query] == piece_T[key], prompt_piece_T[query] == piece_T[key]
        return (query >= key) & (same_piece | own_prompt)

    return create_block_mask(is_visible, None, None, len(pieces), len(pieces), device=str(device))


class _AttentionContext(BackwardCFunction):
    plan: AttentionPlan


class _BlockwiseAttention(torch.autograd.Function):
    """Attention over all blocks. Query heads that share a key head stand in the kernel's batch: no key is copied."""

    @staticmethod
    def forward(
        ctx: _AttentionContext, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """Return the output [1, T, H, D] of queries [1, H, T, D], keys and values [1, K, T, D]."""
        q, k, v = _group_by_key_head(query, key, value)
        groups, heads, length, width = q.shape
        # Stored as the result needs it, [T, K, G, D], and written through a view [G, K, T, D].
        merged = torch.empty(length, heads, groups, width, device=q.device)
        out, lse = merged.permute(2, 1, 0, 3), torch.empty(groups, heads, length, device=q.device)
        for block in attention_blocks(plan.prefix_tree):
            rows = (..., block.queries, slice(None))
            part, part_lse = _flash_forward(
                q[rows], k[..., block.keys, :], v[..., block.keys, :], 0.0, block.causal, scale=plan.scaling
            )
            if not block.merges:
                out[rows], lse[..., block.queries] = part, part_lse
                continue
            before_lse = lse[..., block.queries]
            merged_lse = torch.logaddexp(before_lse, part_lse)
            before_weight = (before_lse - merged_lse).exp().unsqueeze(-1)
            part_weight = (part_lse - merged_lse).exp().unsqueeze(-1)
            out[rows] = out[rows] * before_weight + part * part_weight
            lse[..., block.queries] = merged_lse
        merged = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, merged, lse)
        ctx.plan = plan
        return merged.view(1, length, heads * groups, width)

    @staticmethod
    def backward(ctx: _AttentionContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of queries [1, H, T, D], keys and values [1, K, T, D]; `grad` is [1, T, H, D]."""
        saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
        query, key, value, merged, lse = saved
        q, k, v = _group_by_key_head(query, key, value)
        out, d_out = merged.permute(2, 1, 0, 3), grad.reshape(merged.shape).permute(2, 1, 0, 3)
        d_query = torch.zeros(merged.shape, device=q.device)
        d_q = d_query.permute(2, 1, 0, 3)
        d_k, d_v = torch.zeros(key.shape, device=q.device), torch.zeros(key.shape, device=q.device)
        for block in attention_blocks(ctx.plan.prefix_tree):
            rows, columns = (..., block.queries, slice(None)), (..., block.keys, slice(None))
            # The kernel derives the probabilities of a block from the log-sum-exp that it is given: with the merged
            # output and log-sum-exp, not those of this block, its gradients are those of the whole.
            part_q, part_k, part_v = _flash_backward(
                d_out[rows],
                q[rows],
                k[columns],
                v[columns],
                out[rows],
                lse[..., block.queries],
                0.0,
                block.causal,
                scale=ctx.plan.scaling,
            )
            d_q[rows] += part_q
            d_k[columns] += part_k.sum(dim=0)
            d_v[columns] += part_v.sum(dim=0)
        d_query = d_query.view(query.shape[2], query.shape[1], -1).transpose(0, 1).unsqueeze(0)
        return d_query.to(query.dtype), d_k.to(key.dtype), d_v.to(value.dtype), None


def _group_by_key_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return queries [1, H, T, D] as [G, K, T, D], and keys and values [1, K, T, D] as views of the same shape."""
    key_heads = key.shape[1]
    groups = query.shape[1] // key_heads
    by_key_head = query[0].view(key_heads, groups, *query.shape[2:])
    return by_key_head.transpose(0, 1), key.expand(groups, -1, -1, -1), value.expand(groups, -1, -1, -1)


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    # Dynamic shapes, because every batch has another length and would be compiled anew.
    return torch.compile(flex_attention, dynamic=True)
