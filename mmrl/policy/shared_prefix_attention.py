"""Attention in a packed row, where the responses of a group share one copy of their prompt.

A token sees its prompt and, in its own response, itself and what comes before it. For a prompt of two tokens with
responses of one and of two, where a row is a query and a column a key:

    a . . . .       a: the prompt sees itself, causally
    a a . . .       b: all responses see the prompt
    b b c . .       c: each response sees itself, causally
    b b . c .
    b b . c c

On a CPU no mask is made: a, b and each c is a call of the flash kernel, and the two outputs of a response are merged by
their log-sum-exps in float32. On CUDA, FlexAttention skips the blocks that a mask empties.

Letters in shapes: T tokens of the row, D channels of a head, H query heads, K key heads, G = H / K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from mmrl.policy.batch import PackedGroup
from mmrl.types import UserError
from mmrl.utils.torch_transfer import send

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mmrl.policy.decode_cache import DecodeCache

ATTENTION_NAME = "mmrl_shared_prefix"
PackedGroups = tuple[PackedGroup, ...]

_LEAST_FLEX_CHANNELS = 16  # of a head
_MASK_BLOCK = 128  # side of a block of FlexAttention's mask, in tokens: what its kernels are tuned for

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class AttentionBlock(NamedTuple):
    """Queries that attend to these keys."""

    queries: slice
    keys: slice
    causal: bool  # true: each query sees the keys up to its own place. False: all keys.
    merges: bool  # true if an earlier block had the same queries: the two outputs are to be merged


def install_shared_prefix_attention(model: PreTrainedModel) -> None:
    """Let the language model attend along the `packed_groups` given to its forward, and as SDPA does without one.

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
    packed_groups: PackedGroups | None = None,
    decode_cache: DecodeCache | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Attend, as an attention function of transformers; return the output [1, T, H, D] and no probabilities.

    Args:
        module: the attention layer; not read with `packed_groups`.
        query: queries [1, H, T, D], float32 or bfloat16.
        key: keys [1, K, T, D].
        value: values [1, K, T, D].
        attention_mask: mask for rows without `packed_groups`.
        scaling: factor of query-key products.
        packed_groups: lengths of the prompts and responses in the row; None for ordinary rows.
        decode_cache: cache of rows that share their prompts; None without one. It attends by itself.
        **options: transformers' other arguments.

    Raises:
        UserError: the layer attends within a sliding window only, or its heads are too narrow for FlexAttention.
    """
    if decode_cache is not None:
        return decode_cache.attend(module, query, key, value, attention_mask, scaling), None
    if packed_groups is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return output, None
    if options.get("sliding_window"):
        raise UserError(
            "shared_prefix: the model attends within a sliding window, which a shared prompt cannot; use off"
        )
    if query.is_cuda:
        return _attend_by_flex(query, key, value, packed_groups, scaling), None
    merged: torch.Tensor = _BlockwiseAttention.apply(query, key, value, packed_groups, scaling)  # type: ignore[no-untyped-call]
    return merged, None


def _attend_by_flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed_groups: PackedGroups, scaling: float
) -> torch.Tensor:
    """Return the output [1, T, H, D] that FlexAttention computes; arguments and errors as `shared_prefix_attention`."""
    if query.shape[-1] < _LEAST_FLEX_CHANNELS:
        raise UserError(
            f"shared_prefix: heads of {query.shape[-1]} channels are too narrow for FlexAttention on CUDA, which "
            f"needs {_LEAST_FLEX_CHANNELS}; use off"
        )
    attend = _compiled_flex_attention()
    output: torch.Tensor = attend(
        query,
        key,
        value,
        block_mask=build_block_mask(packed_groups, query.device),
        scale=scaling,
        enable_gqa=True,
        # For fewer than 128 queries torch would take its kernel for decoding, which this mask does not suit.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    return output.transpose(1, 2).contiguous()


def attention_blocks(packed_groups: PackedGroups) -> Iterator[AttentionBlock]:
    """Yield disjoint blocks that cover what is visible in a packed row; the first with a query does not merge."""
    start = 0
    for prompt_length, response_lengths in packed_groups:
        end = start + prompt_length + sum(response_lengths)
        if len(response_lengths) < 2:
            # Nothing is shared, so the group is one sequence.
            yield AttentionBlock(slice(start, end), slice(start, end), causal=True, merges=False)
        else:
            prompt = slice(start, start + prompt_length)
            yield AttentionBlock(prompt, prompt, causal=True, merges=False)
            yield AttentionBlock(slice(prompt.stop, end), prompt, causal=False, merges=False)
            for first, last in pairwise(accumulate(response_lengths, initial=prompt.stop)):
                yield AttentionBlock(slice(first, last), slice(first, last), causal=True, merges=True)
        start = end


@lru_cache(maxsize=2)  # every layer of a forward pass needs the same mask
def build_block_mask(packed_groups: PackedGroups, device: torch.device) -> BlockMask:
    """Return the mask of a packed row for FlexAttention, in memory of (T / 128)² numbers.

    It equals the mask that torch's `create_block_mask` makes of the same rule. But torch evaluates the rule for all
    pairs of tokens at once: 2.5 GiB for 16,000 tokens, and four times as much for twice as many.
    """
    # Prompts and responses are pieces. For each token: the number of its piece, and of its prompt as a piece.
    lengths: list[int] = []
    prompt_pieces: list[int] = []
    for prompt_length, response_lengths in packed_groups:
        prompt_pieces += [len(lengths)] * (1 + len(response_lengths))
        lengths += [prompt_length, *response_lengths]
    length_of_piece = torch.tensor(lengths)
    piece_T = send(torch.arange(len(lengths)).repeat_interleave(length_of_piece), device)
    prompt_piece_T = send(torch.tensor(prompt_pieces).repeat_interleave(length_of_piece), device)

    def is_visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return True where a query sees a key, bool in the shape of their places in the row."""
        same_piece, own_prompt = piece_T[query] == piece_T[key], prompt_piece_T[query] == piece_T[key]
        return (query >= key) & (same_piece | own_prompt)

    visible_pairs = _count_visible_pairs(packed_groups, sum(lengths))
    # The kernel evaluates the rule only in partial blocks; in full ones every pair is visible.
    is_full = visible_pairs == _MASK_BLOCK**2
    counts, indices = [], []
    for is_listed in ((visible_pairs > 0) & ~is_full, is_full):
        counts.append(send(is_listed.sum(dim=-1, dtype=torch.int32)[None, None], device))
        # Each row lists the numbers of its blocks first, in ascending order.
        order = is_listed.int().argsort(dim=-1, descending=True, stable=True)
        indices.append(send(order.int()[None, None], device))
    return BlockMask.from_kv_blocks(
        kv_num_blocks=counts[0],
        kv_indices=indices[0],
        full_kv_num_blocks=counts[1],
        full_kv_indices=indices[1],
        BLOCK_SIZE=_MASK_BLOCK,
        mask_mod=is_visible,
        seq_lengths=(sum(lengths), sum(lengths)),
    )


def _count_visible_pairs(packed_groups: PackedGroups, length: int) -> torch.Tensor:
    """Return the number of visible query-key pairs in each block of the mask, int64 [T / 128, T / 128]."""
    num_blocks = -(-length // _MASK_BLOCK)
    visible_pairs = torch.zeros(num_blocks, num_blocks, dtype=torch.int64)
    for block in attention_blocks(packed_groups):
        query_blocks, num_queries = _tokens_per_block(block.queries)
        key_blocks, num_keys = _tokens_per_block(block.keys)
        pairs = num_queries[:, None] * num_keys
        if block.causal:
            # Queries and keys are the same tokens: n of them in a block on the diagonal make n (n + 1) / 2 pairs.
            pairs = pairs.tril(-1) + torch.diag(num_queries * (num_queries + 1) // 2)
        visible_pairs[query_blocks, key_blocks] += pairs
    return visible_pairs


def _tokens_per_block(span: slice) -> tuple[slice, torch.Tensor]:
    """Return the blocks of the mask that a span of the row touches, and the number of its tokens in each of them."""
    blocks = slice(span.start // _MASK_BLOCK, -(-span.stop // _MASK_BLOCK))
    starts = torch.arange(blocks.start, blocks.stop) * _MASK_BLOCK
    return blocks, (starts + _MASK_BLOCK).clamp(max=span.stop) - starts.clamp(min=span.start)


class _BlockwiseAttention(torch.autograd.Function):
    """Attention over all blocks. Query heads that share a key head form the kernel's batch: no key is copied."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  (torch gives it no type)
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        packed_groups: PackedGroups,
        scaling: float,
    ) -> torch.Tensor:
        """Return the output [1, T, H, D] of queries [1, H, T, D], keys and values [1, K, T, D]."""
        q, k, v = _group_by_key_head(query, key, value)
        queries_per_key, heads, length, width = q.shape
        # Stored as the result needs it, [T, K, G, D], and written through a view [G, K, T, D].
        merged = torch.empty(length, heads, queries_per_key, width, device=q.device)
        out, lse = merged.permute(2, 1, 0, 3), torch.empty(queries_per_key, heads, length, device=q.device)
        for block in attention_blocks(packed_groups):
            rows = (..., block.queries, slice(None))
            part, part_lse = _flash_forward(
                q[rows], k[..., block.keys, :], v[..., block.keys, :], 0.0, block.causal, scale=scaling
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
        ctx.packed_groups, ctx.scaling = packed_groups, scaling
        return merged.view(1, length, heads * queries_per_key, width)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Return the gradients of queries [1, H, T, D], keys and values [1, K, T, D]; `grad` is [1, T, H, D]."""
        query, key, value, merged, lse = ctx.saved_tensors
        q, k, v = _group_by_key_head(query, key, value)
        out, d_out = merged.permute(2, 1, 0, 3), grad.reshape(merged.shape).permute(2, 1, 0, 3)
        d_query = torch.zeros(merged.shape, device=q.device)
        d_q = d_query.permute(2, 1, 0, 3)
        d_k, d_v = torch.zeros(key.shape, device=q.device), torch.zeros(key.shape, device=q.device)
        for block in attention_blocks(ctx.packed_groups):
            rows, columns = (..., block.queries, slice(None)), (..., block.keys, slice(None))
            # The kernel derives the probabilities of a block from the log-sum-exp that it is given. With the merged
            # output and log-sum-exp, not this block's, it returns the gradients of the whole.
            tensors = (d_out[rows], q[rows], k[columns], v[columns], out[rows], lse[..., block.queries])
            part_q, part_k, part_v = _flash_backward(*tensors, 0.0, block.causal, scale=ctx.scaling)
            d_q[rows] += part_q
            d_k[columns] += part_k.sum(dim=0)
            d_v[columns] += part_v.sum(dim=0)
        d_query = d_query.view(query.shape[2], query.shape[1], -1).transpose(0, 1).unsqueeze(0)
        return d_query.to(query.dtype), d_k.to(key.dtype), d_v.to(value.dtype), None, None


def _group_by_key_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return queries [1, H, T, D] as [G, K, T, D], and keys and values [1, K, T, D] as views of the same shape."""
    key_heads = key.shape[1]
    queries_per_key = query.shape[1] // key_heads
    by_key_head = query[0].view(key_heads, queries_per_key, *query.shape[2:])
    return by_key_head.transpose(0, 1), *(tensor.expand(queries_per_key, -1, -1, -1) for tensor in (key, value))


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    # Dynamic shapes, because each batch has another length and would be compiled again.
    return torch.compile(flex_attention, dynamic=True)
