"""The gated delta rule in plain torch, with its own backward pass.

Each head has a state S, [K, V], which stores values by keys of length 1: S^T k is the value for k. Token t lets S decay
by exp(g_t), moves the value for its key by the share beta_t towards v_t, and reads the value for its query:

    u_t = beta_t (v_t - exp(g_t) S_(t-1)^T k_t)        S_t = exp(g_t) S_(t-1) + k_t u_t^T        o_t = S_t^T q_t

Tokens are handled in chunks, by matrix products. Let S be the state before a chunk, and b the running sum of g in it.
The value for a key contains what earlier tokens of the chunk wrote. Without decay, the first two write

    u_1 = beta_1 (v_1 - S^T k_1)        u_2 = beta_2 (v_2 - S^T k_2 - (k_2.k_1) u_1)

so all u of a chunk solve a triangular system. The outputs, and the state S' after the chunk, follow from them:

    (I + A) u = beta (v - exp(b) k S)           A_ts = beta_t exp(b_t - b_s) k_t.k_s  for s < t
    o = exp(b) q S + P u                        P_ts = exp(b_t - b_s) q_t.k_s         for s <= t
    S' = exp(b_C) S + k^T exp(b_C - b) u        b_C: the last b of the chunk

transformers leaves the derivative to autograd, which keeps some twenty tensors as large as the values. Here six are
kept, value heads share the queries and keys of their key head, and the length of chunks leaves the least padding.

Letters in shapes: N sequences, S tokens, G key heads, R value heads for each key head, H = G R value heads, K and V
channels of a key and of a value, X chunks, C tokens of a chunk.

Source: Gated Delta Networks, arXiv:2412.06464v3, sections 3.1 and 3.3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_MAX_CHUNK = 64
_TINY = 1e-30  # below any write strength whose product with a float32 is not zero


class _Chunks(NamedTuple):
    """Tensors of all chunks that do not depend on the state; float32."""

    query_key: torch.Tensor  # queries above keys, [X, N, G, 2 C, K]
    value: torch.Tensor  # [X, N, G, R, C, V]
    write: torch.Tensor  # write strengths beta, [X, N, G, R, C, 1]
    decay: torch.Tensor  # exp(b), the decay from the beginning of the chunk up to a token, [X, N, G, R, C, 1]
    decay_to_end: torch.Tensor  # exp(b_C - b), the decay from a token to the end of the chunk, [X, N, G, R, C, 1]
    pair_decay: torch.Tensor  # exp(b_t - b_s) for s <= t and 0 elsewhere, [X, N, G, R, C, C]
    inverse: torch.Tensor  # inverse of I + A, [X, N, G, R, C, C]
    read: torch.Tensor  # P, [X, N, G, R, C, C]


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    write_strength: torch.Tensor,
    *,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the rule over padded sequences and return outputs [N, S, H, V] and last states [N, H, K, V], float32.

    Padding must have `log_decay` and `write_strength` 0. It then changes no state, whatever its other inputs are.

    Args:
        query: [N, S, G, K]; value heads g R to (g + 1) R - 1 share query and key g.
        key: [N, S, G, K].
        value: [N, S, H, V].
        log_decay: g, at most 0, [N, S, H].
        write_strength: beta, between 0 and 1, [N, S, H].
        initial_state: [N, H, K, V]; None for zeros.
    """
    if initial_state is None:
        initial_state = value.new_zeros(len(value), value.shape[2], key.shape[-1], value.shape[-1], dtype=torch.float32)
    inputs = (query, key, value, log_decay, write_strength, initial_state)
    output, state = _GatedDeltaRule.apply(*(tensor.float() for tensor in inputs))  # type: ignore[no-untyped-call]
    return output, state


@torch.no_grad()
def gated_delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    write_strength: torch.Tensor,
    *,
    state: torch.Tensor,
) -> torch.Tensor:
    """Run the rule over one token of each sequence, change `state` in place, and return outputs [N, H, V], float32.

    The arguments are those of `gated_delta_rule` without the axis S; `state` is float32 and contiguous.
    """
    repeats = value.shape[1] // key.shape[1]
    query_key = torch.stack([query, key], dim=2).float().repeat_interleave(repeats, dim=1)
    decay = log_decay.float().exp()[..., None, None]
    # What query and key read from the old state, in one pass over it.
    by_query, by_key = (query_key @ state).mul_(decay).unbind(2)
    written = (value.float() - by_key) * write_strength.float().unsqueeze(-1)
    state.mul_(decay).addcmul_(query_key[:, :, 1, :, None], written[:, :, None])
    return by_query + (query_key[:, :, 0] * query_key[:, :, 1]).sum(-1, keepdim=True) * written


class _GatedDeltaRule(torch.autograd.Function):
    """The rule and its derivative. States have the layout [N, G, K, R, V] inside: R V columns for each key head."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        """Return outputs [N, S, H, V] and last states [N, H, K, V]; takes the arguments of `gated_delta_rule`."""
        chunks = _prepare_chunks(*inputs[:5])
        num_chunks, _, key_heads, repeats, size, width = chunks.value.shape
        state = torch.unflatten(inputs[5], 1, (key_heads, repeats)).transpose(2, 3).contiguous()
        states, outputs, written = [state], torch.empty_like(chunks.value), torch.empty_like(chunks.value)
        unsolved = torch.empty_like(chunks.value[0])
        for number in range(num_chunks):
            chunk = _Chunks(*(tensor[number] for tensor in chunks))
            # What queries and keys read from the state, [N, G, 2 C, R, V].
            reads = torch.unflatten(chunk.query_key @ state.flatten(3), 3, (repeats, width)).transpose(2, 3)
            by_query, by_key = torch.split(reads, size, dim=3)
            torch.addcmul(chunk.value, by_key, chunk.decay, value=-1.0, out=unsolved)
            torch.matmul(chunk.inverse, unsolved.mul_(chunk.write), out=written[number])
            torch.matmul(chunk.read, written[number], out=outputs[number])
            outputs[number].addcmul_(by_query, chunk.decay)
            weighted = _by_token(written[number], chunk.decay_to_end)
            added = chunk.query_key[..., size:, :].mT @ weighted.flatten(3)
            state = torch.addcmul(added.view_as(state), state, _decay_of_chunk(chunk))
            states.append(state)
        ctx.save_for_backward(written, torch.stack(states), *chunks)
        return _join_chunks(outputs, inputs[2].shape[1]), state.transpose(2, 3).flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: torch.Tensor, d_state: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        """Return the gradients of the six inputs, given those of outputs [N, S, H, V] and states [N, H, K, V].

        From the last chunk to the first, where r is the right side of the system:

            du = P^T do + exp(b_C - b) k dS'        dr = (I + A)^-T du
            dS = exp(b_C) dS' + q^T exp(b) do - k^T beta exp(b) dr
        """
        written, states, *kept = ctx.saved_tensors
        chunks, length = _Chunks(*kept), d_output.shape[1]
        num_chunks, _, key_heads, repeats, size, width = chunks.value.shape
        d_out = _split_chunks(torch.unflatten(d_output, 2, (key_heads, repeats)), num_chunks, size)
        d_written, d_unsolved = chunks.read.mT @ d_out, torch.empty_like(d_out)
        # Gradients of what queries and keys read, [X, N, G, 2 C, R, V].
        d_reads = d_out.new_empty(*chunks.query_key.shape[:-1], repeats, width)
        d_by_query, d_by_key = (part.transpose(3, 4) for part in torch.split(d_reads, size, dim=3))
        torch.mul(d_out, chunks.decay, out=d_by_query)
        d_states = torch.empty_like(states)
        d_states[-1] = torch.unflatten(d_state, 1, (key_heads, repeats)).transpose(2, 3)
        read_decay = chunks.write * chunks.decay
        # Gradients of the exponents of what queries and keys read, [X, N, G, 2 C, R], and of what tokens write.
        d_read_exponents = d_reads.new_empty(d_reads.shape[:-1])
        d_write_exponents = d_written.new_empty(d_written.shape[:-1])
        for number in reversed(range(num_chunks)):
            chunk = _Chunks(*(tensor[number] for tensor in chunks))
            d_next = d_states[number + 1]
            d_weighted = torch.unflatten(chunk.query_key[..., size:, :] @ d_next.flatten(3), 3, (repeats, width))
            d_weighted = d_weighted.transpose(2, 3) * chunk.decay_to_end
            torch.sum(d_weighted * written[number], dim=-1, out=d_write_exponents[number])
            d_written[number] += d_weighted
            torch.matmul(chunk.inverse.mT, d_written[number], out=d_unsolved[number])
            torch.mul(d_unsolved[number], read_decay[number], out=d_by_key[number]).neg_()
            through_reads = (chunk.query_key.mT @ d_reads[number].flatten(3)).view_as(d_next)
            torch.addcmul(through_reads, d_next, _decay_of_chunk(chunk), out=d_states[number])
            reads = (chunk.query_key @ states[number].flatten(3)).view_as(d_reads[number])
            torch.sum(reads.mul_(d_reads[number]), dim=-1, out=d_read_exponents[number])
        # beta scales a row of both A and the right side, so both parts of its gradient add up to this.
        d_write = (d_unsolved * written).sum(-1, keepdim=True) / chunks.write.clamp(min=_TINY)
        d_value = d_unsolved.mul_(chunks.write)
        d_query_key, d_pair_exponents = _product_gradients(chunks, written, d_out, d_value)
        d_query_key += d_reads.flatten(4) @ states[:-1].flatten(4).mT
        d_query, d_key = torch.split(d_query_key, size, dim=-2)
        d_key += _by_token(written, chunks.decay_to_end).flatten(4) @ d_states[1:].flatten(4).mT
        d_read_exponents = d_read_exponents[..., :size, :] + d_read_exponents[..., size:, :]
        d_end_exponent = (states[:-1] * d_states[1:]).sum((3, 5)) * chunks.decay[..., -1, 0]
        d_decay = _decay_gradient(d_pair_exponents, d_read_exponents.mT, d_write_exponents, d_end_exponent)
        return (
            _join_chunks(d_query.unsqueeze(3), length),
            _join_chunks(d_key.unsqueeze(3), length),
            _join_chunks(d_value, length),
            _join_chunks(d_decay.unsqueeze(-1), length).squeeze(-1),
            _join_chunks(d_write, length).squeeze(-1),
            d_states[0].transpose(2, 3).flatten(1, 2),
        )


def _prepare_chunks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, write_strength: torch.Tensor
) -> _Chunks:
    """Cut the arguments of the rule into chunks of equal length, and compute what does not depend on the state."""
    length, heads = query.shape[1], (query.shape[2], value.shape[2] // query.shape[2])
    num_chunks = -(-length // _MAX_CHUNK)
    size = -(-length // num_chunks)
    by_token = (value, log_decay.unsqueeze(-1), write_strength.unsqueeze(-1))
    by_head = [torch.unflatten(tensor, 2, heads) for tensor in by_token]
    value, log_decay, write = (_split_chunks(tensor, num_chunks, size) for tensor in by_head)
    query, key = (_split_chunks(tensor.unsqueeze(3), num_chunks, size) for tensor in (query, key))
    query_key = torch.cat([query, key], dim=4).squeeze(3)
    cumulative = log_decay.cumsum(dim=-2)
    is_later = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
    # Masked before the exponential, which may overflow for s > t.
    pair_decay = (cumulative - cumulative.mT).masked_fill_(is_later, -torch.inf).exp_()
    by_query, by_key = torch.split((query_key @ key.squeeze(3).mT).unsqueeze(3), size, dim=4)
    # The solver assumes a unit diagonal and does not read it.
    inverse = torch.linalg.solve_triangular(
        by_key * pair_decay * write, torch.eye(size, device=key.device), upper=False, unitriangular=True
    )
    return _Chunks(
        query_key=query_key,
        value=value,
        write=write,
        decay=cumulative.exp(),
        decay_to_end=(log_decay.flip(-2).cumsum(-2).flip(-2) - log_decay).exp_(),
        pair_decay=pair_decay,
        inverse=inverse,
        read=by_query * pair_decay,
    )


def _product_gradients(
    chunks: _Chunks, written: torch.Tensor, d_out: torch.Tensor, d_value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients, through A and P, of queries and keys, and of the exponents b_t - b_s for s < t.

    Their shapes are [X, N, G, 2 C, K] and [X, N, G, R, C, C].
    """
    size = written.shape[-2]
    key = chunks.query_key[..., size:, :]
    by_query, by_key = torch.split((chunks.query_key @ key.mT).unsqueeze(3), size, dim=4)
    d_by_query = (d_out @ written.mT).mul_(chunks.pair_decay)
    d_by_key = (d_value @ written.mT).mul_(chunks.pair_decay).neg_().tril_(-1)
    d_exponents = torch.addcmul(d_by_query * by_query, d_by_key, by_key)
    d_products = torch.cat([d_by_query.sum(3), d_by_key.sum(3)], dim=-2)
    d_query_key = d_products @ key
    d_query_key[..., size:, :] += d_products.mT @ chunks.query_key
    return d_query_key, d_exponents


def _decay_gradient(
    d_pairs: torch.Tensor, d_reads: torch.Tensor, d_writes: torch.Tensor, d_end: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the log-decays, [X, N, G, R, C], from those of the exponents that contain them.

    g_j is a term of the exponents b_t - b_s for s < j <= t, of b_t (reads) for j <= t, of b_C - b_t (writes) for t < j,
    and of b_C; the gradients of these are summed. Summing the gradients of b_t over t >= j would be simpler, but there
    pairs with j <= s must cancel, and for fast decays their rounding errors would hide the sum.

    Shapes: d_pairs [X, N, G, R, C, C], d_reads and d_writes [X, N, G, R, C], d_end [X, N, G, R].
    """
    not_later = torch.ones_like(d_pairs[0, 0, 0, 0]).tril()  # [t, j]: j <= t
    d_decay = (not_later.mT @ d_pairs).tril(-1).sum(-1)
    d_decay += d_reads @ not_later + d_writes @ (1.0 - not_later)
    return d_decay + d_end.unsqueeze(-1)


def _split_chunks(tensor: torch.Tensor, num_chunks: int, size: int) -> torch.Tensor:
    """Return [N, S, G, R, V] as contiguous chunks [X, N, G, R, C, V], with zeros after the last token."""
    padding = num_chunks * size - tensor.shape[1]
    if padding:
        tensor = F.pad(tensor, (0, 0, 0, 0, 0, 0, 0, padding))
    return torch.unflatten(tensor, 1, (num_chunks, size)).permute(1, 0, 3, 4, 2, 5).contiguous()


def _join_chunks(chunks: torch.Tensor, length: int) -> torch.Tensor:
    """Return chunks [X, N, G, R, C, V] as one tensor [N, S, H, V] of this length."""
    return chunks.permute(1, 0, 4, 2, 3, 5).flatten(1, 2).flatten(2, 3)[:, :length]


def _by_token(values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return the product of [..., R, C, V] and [..., R, C, 1] in the contiguous layout [..., C, R, V]."""
    swapped = values.transpose(-3, -2)
    return torch.mul(swapped, factor.transpose(-3, -2), out=values.new_empty(swapped.shape))


def _decay_of_chunk(chunk: _Chunks) -> torch.Tensor:
    """Return the decay from the beginning to the end of a chunk as a factor of states, [N, G, 1, R, 1]."""
    return chunk.decay[..., -1:, :].transpose(-3, -2)
