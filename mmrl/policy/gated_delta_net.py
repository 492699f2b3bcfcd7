"""Gated DeltaNet, the recurrent layer of Qwen3.5, in a packed row and after cached rows.

Two parts of the layer link tokens: a causal convolution over the last few tokens, and a recurrent state for each
head. In a packed row, `prompt | first | second second | prompt' | first' ...`, both are forked: each prompt runs once,
and each of its responses starts from the state and the last columns that the prompt ends with. Gradients of all
responses add up in the prompt, because autograd sums over every use of a tensor.

Letters in shapes: T tokens of the row, W hidden size, C channels of the convolution or of all heads together, N pieces
(prompts or responses) of a batch, R cached rows, S columns of a padded batch or of the convolution's window, G key
heads, H value heads, K and V channels of a key and of a value.

`fork_forward` runs a packed row, `append_forward` new tokens after cached rows, and `step_forward` a single one on a
CPU. All else is left to transformers. The rule itself is `mmrl.policy.delta_rule`, over batches of pieces padded with
zeros, or flash-linear-attention's kernel, over pieces one after the other in one row.

Source: Gated Delta Networks, arXiv:2412.06464v3, section 3.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F

from mmrl.policy.delta_rule import gated_delta_rule, gated_delta_step
from mmrl.policy.gated_delta_kernels import has_rule_kernel, install_kernel_choice, run_rule_kernel
from mmrl.policy.shared_prefix_attention import PackedGroups
from mmrl.utils.torch_transfer import send_numbers

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

_CHUNK = 64  # tokens that the rule handles at a time; pieces of as many chunks share a batch
_EPSILON = 1e-6  # of transformers' `l2norm`
_ZERO_ROW = (0, 0, 0, 1)  # of `pad`: zeros after the last row of a matrix


class SequenceBatch(NamedTuple):
    """Pieces of similar length, padded on the right; or, for a kernel, pieces of any length in one row."""

    # Positions of their tokens in the row; T, one past the last, for padding. int64 [N, S], or [1, S].
    tokens_NS: torch.Tensor
    # Number of each piece in the order of the row, counted apart for prompts and for responses. int64.
    pieces_N: torch.Tensor
    # First token of each piece in a joint row, and the end of the last. int64 [N + 1]; None if each has a row.
    bounds: torch.Tensor | None = None


class SharedPrefixPlan(NamedTuple):
    """Indices by which every layer of a forward pass forks a packed row: tokens of its convolution and its pieces."""

    # Positions of the tokens that the convolution runs over: each piece preceded by the tokens before it. int64.
    conv_tokens: torch.Tensor
    conv_kept_T: torch.Tensor  # places of the row's own tokens in `conv_tokens`. int64.
    prompts: tuple[SequenceBatch, ...]
    responses: tuple[SequenceBatch, ...]
    prompt_of_response: torch.Tensor  # number of the prompt of each response. int64.
    output_places_T: torch.Tensor  # places of the row's tokens in all batches, one after the other. int64.


class AppendPlan(NamedTuple):
    """Indices that put new tokens, padded on the left, after cached ones; see `plan_append`. int64."""

    leftward_RS: torch.Tensor  # column that each column takes, so that a row's tokens begin in the first one
    tokens_RS: torch.Tensor  # numbers of the tokens, moved to the left, among all columns of all rows; R S for padding
    window_RS: torch.Tensor  # columns of the next window in the old window and the tokens after it
    rightward_RS: torch.Tensor  # column that each column takes, so that a row's outputs end in the last one


class RuleInputs(NamedTuple):
    """Arguments of the delta rule for each token, and zeros at the end, which neither decay nor write the state."""

    query_key_value: torch.Tensor  # queries, keys and values of all heads, [T + 1, C]
    log_decay: torch.Tensor  # logarithm of the factor that the state shrinks by, float32 [T + 1, H]
    write_strength: torch.Tensor  # [T + 1, H]


def install_gated_delta_net(model: PreTrainedModel) -> None:
    """Let each Gated DeltaNet layer fork its state along `packed_groups` and skip padding after a cache."""
    layers = [module for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet")]
    for layer in layers:
        install_kernel_choice(sys.modules[type(layer).__module__])
        # On the instance: another model of the class, such as an engine's, keeps its own forward. `deepcopy` binds the
        # method of a copy to the copy.
        layer.forward = _forward.__get__(layer)


def _forward(
    layer: Any,  # noqa: ANN401  (transformers has a class for each family)
    hidden_states: torch.Tensor,
    cache_params: Cache | None = None,
    attention_mask: torch.Tensor | None = None,
    packed_groups: PackedGroups | None = None,
    **options: Any,  # noqa: ANN401
) -> torch.Tensor:
    """Return the layer's output for hidden states [R, S, W], in their shape."""
    if packed_groups is not None:
        return fork_forward(layer, hidden_states, packed_groups)
    # transformers sets the hidden states of padding to zero. That is exact before the first token, but not after a
    # cached one, where padding makes the state decay and the convolution writes the end of the cached text again.
    is_continued = cache_params is not None and cache_params.has_previous_state(layer.layer_idx, state_idx=0)
    if is_continued and attention_mask is not None:
        return append_forward(layer, hidden_states, cache_params, attention_mask)
    # Not on a GPU, which has a kernel for a single token.
    if is_continued and hidden_states.shape[1] == 1 and not hidden_states.is_cuda and not torch.is_grad_enabled():
        return step_forward(layer, hidden_states, cache_params)
    plain = type(layer).forward
    output: torch.Tensor = plain(
        layer, hidden_states, cache_params=cache_params, attention_mask=attention_mask, **options
    )
    return output


def fork_forward(layer: Any, hidden_1TW: torch.Tensor, packed_groups: PackedGroups) -> torch.Tensor:  # noqa: ANN401
    """Return the layer's output for a packed row, [1, T, W]; each response starts from its prompt's state."""
    plan = plan_fork(packed_groups, layer.conv_kernel_size, hidden_1TW.device, has_rule_kernel(hidden_1TW))
    mixed_TC = layer.in_proj_qkv(hidden_1TW)[0]
    conv_input = F.pad(mixed_TC, _ZERO_ROW).index_select(0, plan.conv_tokens)
    convolved_TC = _convolve(layer, conv_input[None])[0].index_select(0, plan.conv_kept_T)
    inputs = _rule_inputs(layer, convolved_TC, layer.in_proj_b(hidden_1TW)[0], layer.in_proj_a(hidden_1TW)[0])
    inputs = RuleInputs(*(F.pad(tensor, _ZERO_ROW) for tensor in inputs))

    outputs, states = [], []
    for batch in plan.prompts:
        output, state = _apply_rule(layer, inputs, batch.tokens_NS, None, batch.bounds)
        outputs.append(output.flatten(0, 1))
        states.append(state)
    order = torch.cat([batch.pieces_N for batch in plan.prompts]).argsort()
    state_of_prompt = torch.cat(states)[order]
    for batch in plan.responses:
        initial = state_of_prompt[plan.prompt_of_response[batch.pieces_N]]
        output, _ = _apply_rule(layer, inputs, batch.tokens_NS, initial, batch.bounds)
        outputs.append(output.flatten(0, 1))

    output_THV = torch.cat(outputs).index_select(0, plan.output_places_T)
    return _project(layer, output_THV[None], layer.in_proj_z(hidden_1TW))


def append_forward(layer: Any, hidden_RSW: torch.Tensor, cache: Cache, mask_RS: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Return the layer's output [R, S, W] for new tokens after cached rows, and put them into the cache.

    The new tokens are padded on the left, where `mask_RS` is 0. Padding changes neither the state nor the window of the
    convolution, and its output means nothing. Within this function the new tokens are moved to the left, where they
    follow the cached ones without a gap.
    """
    state = cache.layers[layer.layer_idx]
    window_RCS = state.conv_states[0]
    plan = plan_append(mask_RS, window_RCS.shape[-1])
    mixed_RSC = torch.take_along_dim(layer.in_proj_qkv(hidden_RSW), plan.leftward_RS[..., None], dim=1)
    continued = torch.cat([window_RCS.transpose(1, 2), mixed_RSC], dim=1)
    window_RCS.copy_(torch.take_along_dim(continued, plan.window_RS[..., None], dim=1).transpose(1, 2))

    convolved_RSC = _convolve(layer, continued)[:, -hidden_RSW.shape[1] :]
    write_RSH = torch.take_along_dim(layer.in_proj_b(hidden_RSW), plan.leftward_RS[..., None], dim=1)
    decay_RSH = torch.take_along_dim(layer.in_proj_a(hidden_RSW), plan.leftward_RS[..., None], dim=1)
    flat = (tensor.flatten(0, 1) for tensor in (convolved_RSC, write_RSH, decay_RSH))
    inputs = RuleInputs(*(F.pad(tensor, _ZERO_ROW) for tensor in _rule_inputs(layer, *flat)))
    output_RSHV, last_state = _apply_rule(layer, inputs, plan.tokens_RS, state.recurrent_states[0])
    cache.update_recurrent_state(last_state, layer.layer_idx)

    output_RSC = torch.take_along_dim(output_RSHV.flatten(2), plan.rightward_RS[..., None], dim=1)
    return _project(layer, output_RSC.view_as(output_RSHV), layer.in_proj_z(hidden_RSW))


def plan_append(mask_RS: torch.Tensor, window_length: int) -> AppendPlan:
    """Return the indices that `append_forward` needs, where the convolution's window has `window_length` columns.

    With three rows of 1, 2 and 3 new tokens, and a window of 2 columns (padding has the number 9):

        mask_RS   leftward_RS   tokens_RS   window_RS   rightward_RS
        0 0 1     2 2 2         0 9 9       1 2         0 0 0
        0 1 1     1 2 2         3 4 9       2 3         0 0 1
        1 1 1     0 1 2         6 7 8       3 4         0 1 2
    """
    num_columns = mask_RS.shape[1]
    columns_S = torch.arange(num_columns, device=mask_RS.device)
    count_R1 = mask_RS.sum(dim=1, keepdim=True).long()
    numbers_RS = torch.arange(mask_RS.numel(), device=mask_RS.device).view_as(mask_RS)
    return AppendPlan(
        leftward_RS=(columns_S + num_columns - count_R1).clamp(max=num_columns - 1),
        tokens_RS=torch.where(columns_S < count_R1, numbers_RS, mask_RS.numel()),
        window_RS=count_R1 + torch.arange(window_length, device=mask_RS.device),
        rightward_RS=(columns_S - num_columns + count_R1).clamp(min=0),
    )


def step_forward(layer: Any, hidden_R1W: torch.Tensor, cache: Cache) -> torch.Tensor:  # noqa: ANN401
    """Return the layer's output [R, 1, W] for one new token after each cached row, and put it into the cache.

    transformers' own function reads the states a dozen times, which takes longer than the rest of the layer.
    """
    state = cache.layers[layer.layer_idx]
    mixed_RC1 = layer.in_proj_qkv(hidden_R1W).transpose(1, 2)
    window_RCS = state.conv_states[0]
    window_RCS.copy_(torch.cat([window_RCS[..., 1:], mixed_RC1], dim=-1))
    activation = sys.modules[type(layer).__module__].ACT2FN[layer.activation]
    convolved_RC = activation((window_RCS * layer.conv1d.weight.squeeze(1)).sum(dim=-1))
    write_RH, decay_RH = layer.in_proj_b(hidden_R1W)[:, 0], layer.in_proj_a(hidden_R1W)[:, 0]
    inputs = _rule_inputs(layer, convolved_RC, write_RH, decay_RH)
    query_RGK, key_RGK, value_RHV = _split_normalized_heads(layer, inputs.query_key_value)
    output_RHV = gated_delta_step(
        query_RGK, key_RGK, value_RHV, inputs.log_decay, inputs.write_strength, state=state.recurrent_states[0]
    )
    return _project(layer, output_RHV[:, None].to(value_RHV.dtype), layer.in_proj_z(hidden_R1W))


@lru_cache(maxsize=2)  # every layer of a forward pass needs the same plan
def plan_fork(
    packed_groups: PackedGroups, kernel_size: int, device: torch.device, in_one_row: bool = False
) -> SharedPrefixPlan:
    """Return the plan of a packed row for layers whose convolution reaches over `kernel_size` tokens.

    With `in_one_row` the plan is for flash-linear-attention's kernel.

    The row `0 1 | 2 | 3 4 | 5 | 6` of T = 7 tokens has a prompt of two tokens with two responses, and one of a single
    token with one response. For a kernel of 3 tokens the plan is as follows; position 7 stands for zeros:

    - `conv_tokens`: 7 7 0 1, then 0 1 2, 0 1 3 4, 7 7 5 and 7 5 6; `conv_kept_T`: 2 3 6 9 10 13 16
    - `tokens_NS` of the prompts: 0 1, 5 7; of the responses: 2 7, 3 4, 6 7; `prompt_of_response`: 0 0 1
    - `output_places_T`: 0 1 4 6 7 2 8, since the batches have 0 1 5 7 2 7 3 4 6 7 one after the other
    """
    padding = sum(prompt_length + sum(lengths) for prompt_length, lengths in packed_groups)
    context_length = kernel_size - 1
    nothing = [padding] * context_length
    pieces: list[tuple[range, list[int]]] = []  # each with the tokens before it that its convolution reads
    prompts: list[range] = []
    responses: list[range] = []
    prompt_of_response: list[int] = []
    end = 0
    for prompt_length, response_lengths in packed_groups:
        prompt = range(end, end + prompt_length)
        pieces.append((prompt, nothing))
        end = prompt.stop
        for length in response_lengths:
            response = range(end, end + length)
            # Zeros come before a prompt that is shorter than the kernel.
            pieces.append((response, [*nothing, *prompt][-context_length:]))
            responses.append(response)
            prompt_of_response.append(len(prompts))
            end = response.stop
        prompts.append(prompt)
    conv_tokens: list[int] = []
    conv_kept: list[int] = []
    for piece, context in pieces:
        conv_tokens += context
        conv_kept += range(len(conv_tokens), len(conv_tokens) + len(piece))
        conv_tokens += piece
    make_batches = _join_pieces if in_one_row else partial(_batch_by_length, padding=padding)
    prompt_batches = tuple(make_batches(prompts, device=device))
    response_batches = tuple(make_batches(responses, device=device))
    # Each token of the row is in one batch; the place of padding, all of which has position T, is cut off.
    batched = torch.cat([batch.tokens_NS.flatten() for batch in (*prompt_batches, *response_batches)])
    output_places = torch.empty(padding + 1, dtype=torch.int64, device=device)
    output_places[batched] = torch.arange(len(batched), device=device)
    return SharedPrefixPlan(
        conv_tokens=send_numbers(conv_tokens, device),
        conv_kept_T=send_numbers(conv_kept, device),
        prompts=prompt_batches,
        responses=response_batches,
        prompt_of_response=send_numbers(prompt_of_response, device),
        output_places_T=output_places[:-1],
    )


def _join_pieces(pieces: Sequence[range], *, device: torch.device) -> Iterable[SequenceBatch]:
    """Yield all pieces as one row, one after the other; nothing if there are none."""
    if pieces:
        tokens = list(chain.from_iterable(pieces))
        bounds = list(accumulate(map(len, pieces), initial=0))
        yield SequenceBatch(
            send_numbers([tokens], device),
            torch.arange(len(pieces), device=device),
            send_numbers(bounds, device),
        )


def _batch_by_length(pieces: Sequence[range], *, padding: int, device: torch.device) -> Iterable[SequenceBatch]:
    """Yield pieces in batches in which no piece has more than twice the chunks of another."""
    by_size: dict[int, list[int]] = {}
    for number, piece in enumerate(pieces):
        chunks = -(-len(piece) // _CHUNK)
        # The classes are 1 chunk, 2, 3 to 4, 5 to 8, and so on.
        by_size.setdefault((chunks - 1).bit_length(), []).append(number)
    for numbers in by_size.values():
        longest = max(len(pieces[number]) for number in numbers)
        rows = [[*pieces[number], *[padding] * (longest - len(pieces[number]))] for number in numbers]
        yield SequenceBatch(send_numbers(rows, device), send_numbers(numbers, device))


def _convolve(layer: Any, mixed_RSC: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Return the layer's causal convolution along columns S, with its activation, in the same shape."""
    convolve = sys.modules[type(layer).__module__].causal_conv1d_fn
    # `squeeze` on the weight, not a call of the module: transformers does the same, and ZeRO-3 then gathers it.
    weight = layer.conv1d.weight.squeeze(1)
    convolved: torch.Tensor = convolve(
        mixed_RSC.transpose(1, 2), weight, layer.conv1d.bias, activation=layer.activation
    )
    return convolved.transpose(1, 2)


def _rule_inputs(layer: Any, convolved_TC: torch.Tensor, write_TH: torch.Tensor, decay_TH: torch.Tensor) -> RuleInputs:  # noqa: ANN401
    """Return the arguments of the rule for tokens, from the outputs of the layer's projections."""
    return RuleInputs(
        query_key_value=convolved_TC,
        # In float32, as transformers has it: the exponential overflows in float16.
        log_decay=-layer.A_log.float().exp() * F.softplus(decay_TH.float() + layer.dt_bias),
        write_strength=write_TH.sigmoid(),
    )


def _apply_rule(
    layer: Any,  # noqa: ANN401
    inputs: RuleInputs,
    tokens_NS: torch.Tensor,
    initial_state: torch.Tensor | None,
    bounds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the rule over tokens of `inputs`; return outputs [N, S, H, V] and the states after the last tokens.

    States have the shape [N, H, K, V] and are float32. `bounds` delimit pieces in one row.
    """
    # Not `tensor[tokens]`, whose backward pass adds up single numbers.
    taken = [tensor.index_select(0, tokens_NS.flatten()).view(*tokens_NS.shape, -1) for tensor in inputs]
    if bounds is not None:
        query, key, value = _split_heads(layer, taken[0])
        # The kernel has a query and a key for each value head, and normalizes them.
        repeats = layer.num_v_heads // layer.num_k_heads
        query, key = (tensor.repeat_interleave(repeats, dim=2) for tensor in (query, key))
        return run_rule_kernel((query, key, value, *taken[1:]), initial_state, bounds)
    query, key, value = _split_normalized_heads(layer, taken[0])
    output, state = gated_delta_rule(query, key, value, *taken[1:], initial_state=initial_state)
    return output.to(value.dtype), state


def _split_heads(layer: Any, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # noqa: ANN401
    """Return the queries and keys [..., G, K] and the values [..., H, V] in the channels of `mixed`, [..., C]."""
    query, key, value = torch.split(mixed, [layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    query, key = (torch.unflatten(part, -1, (-1, layer.head_k_dim)) for part in (query, key))
    return query, key, torch.unflatten(value, -1, (-1, layer.head_v_dim))


def _split_normalized_heads(layer: Any, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # noqa: ANN401
    """Return `_split_heads` with queries and keys in float32; a key has length 1, a query 1 / sqrt(K)."""
    query, key, value = _split_heads(layer, mixed)
    return _normalize(query.float()) * layer.head_k_dim**-0.5, _normalize(key.float()), value


def _normalize(vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors [..., K] of length 1."""
    return vectors * torch.rsqrt(vectors.square().sum(dim=-1, keepdim=True) + _EPSILON)


def _project(layer: Any, output_RSHV: torch.Tensor, gate_RSC: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Return the layer's output [R, S, W] from outputs of the rule and the gate's projection."""
    rows = output_RSHV.shape[:2]
    normed = layer.norm(output_RSHV.reshape(-1, layer.head_v_dim), gate_RSC.reshape(-1, layer.head_v_dim))
    projected: torch.Tensor = layer.out_proj(normed.reshape(*rows, -1))
    return projected
