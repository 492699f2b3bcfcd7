"""Attention on the pretended device: one operator, which keeps what a flash kernel keeps, and whose work is known.

Torch would take attention apart on a device it does not know, into products as large as queries times keys. Letters in
shapes: B sequences, H query heads, K key heads, T tokens, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from mmrl.policy import shared_prefix_attention, vision_attention


@torch.library.custom_op("mmrl_plan::attention", mutates_args=())
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pairs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [B, H, T, D] and log-sum-exps [B, H, T] of queries [B, H, T, D], keys and values [B, K, T, D].

    `pairs` says how many pairs of a query and a key see each other in a head.
    """
    raise NotImplementedError  # only shapes are ever asked for


@torch.library.custom_op("mmrl_plan::attention_backward", mutates_args=())
def attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    pairs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values, in their shapes."""
    raise NotImplementedError


@attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


@attention_backward.register_fake
def _(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    pairs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:  # noqa: ANN401
    *tensors, ctx.pairs = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
    return *attention_backward(grad, *ctx.saved_tensors, ctx.pairs), None


attention.register_autograd(_backward, setup_context=_keep)


@contextmanager
def attend_in_one_call(packed_pairs: int) -> Iterator[None]:
    """Let a model attend by `attention` inside this block. `packed_pairs` are the pairs of the packed row."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object) -> torch.Tensor:
        pairs = packed_pairs if "block_mask" in options else query.shape[0] * query.shape[2] ** 2
        output: torch.Tensor = attention(query, key, value, pairs)[0]
        return output

    with (
        patch.object(shared_prefix_attention, "_compiled_flex_attention", lambda: attend),
        patch.object(vision_attention, "scaled_dot_product_attention", attend),
        # Else checkpointing asks for an autocast of the device in the backward pass, which aborts the process.
        patch.object(torch.amp, "is_autocast_available", lambda device_type: device_type == "cpu"),
    ):
        yield
