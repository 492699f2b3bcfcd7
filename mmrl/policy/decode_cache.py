"""The key-value cache of the engine `hf`, where the keys of a prompt are kept, and read, once for its whole group.

The learner shares prompts in another way: `mmrl.policy.shared_prefix_attention`.

A row is a rollout. Its new tokens attend to the row's own tokens and, in another call, to the prompt: the queries of
all rows of a prompt form one long query for the one copy of its keys. The two outputs of a token are merged in float32,
weighted by their sums of exponentials, which is exact. The literature calls this cascade attention.

Letters in shapes: B prompts, P columns of padded prompts, N rows of a prompt, R rows, S columns of a row's own tokens
(after those of its prompt, where prompts are not shared), T new columns, H query heads, K key heads, G = H / K, D
channels of a head.

Source: Hydragen, arXiv:2402.05099v2, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from mmrl.utils.torch_transfer import send, send_numbers

_CHUNK_COLUMNS = 256  # columns by which the buffers of own keys and values grow

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_efficient_forward = torch.ops.aten._scaled_dot_product_efficient_attention


class DecodeCache:
    """The caches of all layers, one row for each rollout. Removing finished rows moves only a few of the others."""

    def __init__(
        self, prompts: Cache, prompt_of_row: Sequence[int], keep_BP: torch.Tensor, *, shares_prompts: bool
    ) -> None:
        """Take over the cache of prompts.

        Args:
            prompts: the caches of all layers after the prompts, [B, ...].
            prompt_of_row: number of each row's prompt.
            keep_BP: 1 for tokens of prompts, 0 for padding, int64.
            shares_prompts: keep each prompt once. Only `DecodeCache.attend` can; other attentions need a copy a row.
        """
        self.cache = prompts
        self._shares_prompts = shares_prompts and not any(prompts.is_sliding)
        # The last layer is an attention layer in every family.
        self._device = prompts.layers[-1].device
        self._dtype = prompts.layers[-1].dtype
        self._prompt_of_row = list(prompt_of_row)
        # 1 for a token and 0 for padding in the columns of `cache`, int64; None if no column is padding.
        self._keep_RS: torch.Tensor | None = None
        self._keep_BP = None if keep_BP.all() else send(keep_BP.bool(), self._device)
        rows = send_numbers(self._prompt_of_row, self._device)
        if not self._shares_prompts:
            prompts.reorder_cache(rows)
            self._keep_RS = send(keep_BP, self._device)[rows]
            return
        for number, layer in enumerate(prompts.layers):
            if isinstance(layer, LinearAttentionLayer):
                layer.reorder_cache(rows)
            else:
                prompts.layers[number] = _SharedPromptLayer(layer)
        self._group_rows()

    def forward_arguments(self) -> dict[str, object]:
        """Return the arguments by which a model's forward reads and extends this cache."""
        arguments: dict[str, object] = {"past_key_values": self.cache, "use_cache": True}
        if self._shares_prompts:
            arguments["decode_cache"] = self
        return arguments

    def extend_mask(self, keep_RT: torch.Tensor) -> torch.Tensor:
        """Add columns, in which `keep_RT` is 1 for tokens, int64; return their attention mask, [R, S]."""
        before = [] if self._keep_RS is None else [self._keep_RS]
        self._keep_RS = torch.cat([*before, keep_RT], dim=1)
        return self._keep_RS

    def extend_mask_by_token(self) -> torch.Tensor | None:
        """Add a column with a token in each row; return its attention mask, [R, S] or [R, 1, 1, S], or None."""
        if self._keep_RS is None:
            return None
        self._keep_RS = F.pad(self._keep_RS, (0, 1), value=1)
        # transformers checks in each step if a mask of two dimensions hides anything, which would wait for a GPU.
        return _to_bias(self._keep_RS[:, None, None].bool(), self._dtype) if self._shares_prompts else self._keep_RS

    def keep_rows(self, kept: Sequence[int]) -> list[int]:
        """Drop all rows but `kept`; rows from the end fill the gaps. Return the old number of the row in each place.

        A prompt whose last row is dropped goes in the same way. If five rows have the prompts 0 1 1 2 2 and `kept` is
        1 3 4, the result is 3 1 4. These rows had the prompts 2 1 2; prompt 2 moves to place 0, so they are now 0 1 0.
        """
        row_moves = _plan_moves(kept, self._device)
        order = row_moves.order
        self._prompt_of_row = [self._prompt_of_row[row] for row in order]
        if not self._shares_prompts:
            order_R = send_numbers(order, self._device)
            assert self._keep_RS is not None  # set above, for rows that do not share prompts
            self._keep_RS = self._keep_RS[order_R]
            self.cache.reorder_cache(order_R)
            return order
        if self._keep_RS is not None:
            self._keep_RS = row_moves.apply(self._keep_RS)
        prompt_moves = _plan_moves(sorted(set(self._prompt_of_row)), self._device)
        place_of_prompt = {prompt: place for place, prompt in enumerate(prompt_moves.order)}
        self._prompt_of_row = [place_of_prompt[prompt] for prompt in self._prompt_of_row]
        if self._keep_BP is not None:
            self._keep_BP = prompt_moves.apply(self._keep_BP)
        for layer in self.cache.layers:
            if isinstance(layer, LinearAttentionLayer):
                layer.conv_states[0] = row_moves.apply(layer.conv_states[0])
                layer.recurrent_states[0] = row_moves.apply(layer.recurrent_states[0])
                continue
            layer.prompt_keys = prompt_moves.apply(layer.prompt_keys)
            layer.prompt_values = prompt_moves.apply(layer.prompt_values)
            if layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = row_moves.apply(layer.keys), row_moves.apply(layer.values)
        self._group_rows()
        return order

    def attend(
        self,
        module: Any,  # noqa: ANN401  (transformers has a class for each family)
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
    ) -> torch.Tensor:
        """Return the attention output of new tokens over their prompts and their rows, [R, T, H, D].

        Args:
            module: the attention layer, whose index selects the keys and values of prompts.
            query: queries [R, H, T, D].
            key: the rows' own keys [R, K, S, D], new ones included.
            value: the rows' own values [R, K, S, D].
            mask: [R, 1, T, S], bool or added to scores; None if a token sees all own keys up to its own.
            scaling: factor of query-key products.
        """
        layer = self.cache.layers[module.layer_idx]
        # Heads that share a key are further queries of it.
        query_RKGTD = torch.unflatten(query, 1, (key.shape[1], -1))
        own_bias = _bias_of_own_keys(mask, query_RKGTD, key)
        own, own_lse = _attend(query_RKGTD.flatten(2, 3), key, value, own_bias, scaling)
        # All rows of a prompt are one long query of its keys.
        query_BKNGTD = query_RKGTD[self._rows_BN].transpose(1, 2)
        shared, shared_lse = _attend(
            query_BKNGTD.flatten(2, 4), layer.prompt_keys, layer.prompt_values, self._prompt_bias, scaling
        )
        shared_RKGTD = self._by_row(shared.view(query_BKNGTD.shape))
        shared_lse_RKGT = self._by_row(shared_lse.view(query_BKNGTD.shape[:-1]))
        own_RKGTD, own_lse_RKGT = own.view(shared_RKGTD.shape), own_lse.view(shared_lse_RKGT.shape)
        shared_weight_RKGT = torch.sigmoid(shared_lse_RKGT - own_lse_RKGT)
        merged_RKGTD = torch.lerp(own_RKGTD.float(), shared_RKGTD.float(), shared_weight_RKGT.unsqueeze(-1))
        return merged_RKGTD.flatten(1, 2).transpose(1, 2).to(query.dtype)

    def _by_row(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor [B, K, N, ...] as [R, K, ...], without the rows that only pad a prompt."""
        return tensor.transpose(1, 2).flatten(0, 1)[self._place_R]

    def _group_rows(self) -> None:
        """Compute the indices that put the rows of each prompt next to each other, and back into their places."""
        rows_of_prompt: list[list[int]] = [[] for _ in range(max(self._prompt_of_row) + 1)]
        place_of_row = []
        for row, prompt in enumerate(self._prompt_of_row):
            place_of_row.append((prompt, len(rows_of_prompt[prompt])))
            rows_of_prompt[prompt].append(row)
        most = max(map(len, rows_of_prompt))
        # A prompt with fewer rows than another repeats its first one; that output is not read.
        padded = [rows + rows[:1] * (most - len(rows)) for rows in rows_of_prompt]
        self._rows_BN = send_numbers(padded, self._device)
        self._place_R = send_numbers([prompt * most + place for prompt, place in place_of_row], self._device)
        self._prompt_bias = None
        if self._keep_BP is not None:
            self._prompt_bias = _to_bias(self._keep_BP[:, None, None], self._dtype)


class _Moves(NamedTuple):
    """Fills the places of dropped rows in a tensor [R, ...] with rows from its end.

    Where rows 1 3 4 of five are kept, the places 0 and 2 are free: `to` is 0 2, `start` is 3 4, and `order` is 3 1 4.
    """

    order: list[int]  # numbers of the rows that are left, in their new places
    # Places that are filled, and the rows that fill them, int64. On the device, where they serve all layers: an index
    # in CPU memory would make the CPU wait for a GPU at each use.
    to: torch.Tensor
    start: torch.Tensor

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move the rows of a tensor [R, ...] in place; return those that are left, as a part of its memory."""
        if len(self.to):
            tensor[self.to] = tensor[self.start]
        return tensor[: len(self.order)]


class _SharedPromptLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """Keys and values of prompts, [B, K, P, D], and of each row's own tokens, in buffers that grow in chunks."""

    def __init__(self, prompts: DynamicLayer) -> None:
        super().__init__()
        self.prompt_keys, self.prompt_values = prompts.keys, prompts.values
        self.dtype, self.device = prompts.dtype, prompts.device
        self.is_initialized = True
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self._length = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [R, K, T, D]; return all own keys and values, [R, K, S, D]."""
        start, self._length = self._length, self._length + key_states.shape[2]
        if self.keys is None or self.values is None or self._length > self.keys.shape[2]:
            self.keys, self.values = self._grow(self.keys, key_states), self._grow(self.values, value_states)
        keys, values = self.keys[:, :, : self._length], self.values[:, :, : self._length]
        keys[:, :, start:], values[:, :, start:] = key_states, value_states
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of own columns."""
        return self._length

    def _grow(self, buffer: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        """Return a buffer that begins with `buffer` and has room for `self._length` columns shaped like `new`."""
        columns = -(-self._length // _CHUNK_COLUMNS) * _CHUNK_COLUMNS
        grown = new.new_empty(*new.shape[:2], columns, new.shape[3])
        if buffer is not None:
            grown[:, :, : buffer.shape[2]] = buffer
        return grown


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B, K, T, D] of attention to keys [B, K, S, D], and its log-sum-exps, float32 [B, K, T].

    `bias` is added to scores, [B, 1, T or 1, S].
    """
    if not query.is_cuda:
        output, lse = _flash_forward(query, key, value, 0.0, False, attn_mask=bias, scale=scaling)
        return output, lse
    if bias is not None:
        # The kernel reads rows of the bias that begin at multiples of 16 bytes.
        columns = bias.shape[-1]
        aligned = F.pad(bias, (0, -columns % 16))[..., :columns]
        bias = aligned.expand(*query.shape[:3], columns)
    output, lse, *_ = _efficient_forward(query, key, value, bias, True, scale=scaling)
    return output, lse[..., : query.shape[2]]


def _bias_of_own_keys(mask: torch.Tensor | None, query_RKGTD: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return the bias of a row's own keys [R, K, S, D], added to scores, [R or 1, 1, G T or 1, S].

    None if a query sees all of them. `mask` is the argument of `DecodeCache.attend`.
    """
    num_queries, num_new, num_own = query_RKGTD.shape[2], query_RKGTD.shape[3], key.shape[2]
    if mask is None and num_new > 1:
        visible = torch.ones(num_new, num_own, dtype=torch.bool, device=key.device)
        mask = visible.tril(num_own - num_new)[None, None]
    if mask is None:
        return None
    bias = mask if mask.dtype == query_RKGTD.dtype else _to_bias(mask, query_RKGTD.dtype)
    return bias if bias.shape[2] == 1 else bias.repeat(1, 1, num_queries, 1)


def _to_bias(keep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where `keep` is True and the least number elsewhere, in its shape.

    Not minus infinity: a query of padding may see no key, and its output must stay a number.
    """
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill_(~keep, torch.finfo(dtype).min)


def _plan_moves(kept: Sequence[int], device: torch.device) -> _Moves:
    """Return moves that leave the rows `kept`, ascending numbers: rows from the end fill the gaps before them."""
    order = list(range(len(kept)))
    gaps = sorted(set(order).difference(kept))
    moved = kept[len(kept) - len(gaps) :]
    for gap, number in zip(gaps, moved, strict=True):
        order[gap] = number
    return _Moves(order, send_numbers(gaps, device), send_numbers(moved, device))
