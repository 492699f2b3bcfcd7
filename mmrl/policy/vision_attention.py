"""Attention of the vision tower, where a patch attends only to the patches of its window.

A window is a frame of an image or video, or in most blocks of Qwen2.5-VL a square of it. For SDPA, transformers reads
the windows' lengths from the device in each block, and calls the kernel once for each window: some 1,800 times for one
image of 64 x 64 patches in Qwen2.5-VL-3B. Here the CPU computes the lengths once for a forward, from grids in its own
memory. On CUDA a block then attends in a single call, elsewhere in one call for each length that windows have. The
convolution that the tower begins with becomes a matrix product.

Letters in shapes: T patches, H heads, D channels of a head, N windows, I images or videos.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from mmrl.utils.torch_transfer import send

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

# transformers hands all windows over in one call only if the name of an attention contains "flash".
ATTENTION_NAME = "mmrl_flash_vision"


class PatchWindows(NamedTuple):
    """The windows that the patches of a tower form, in order."""

    lengths: tuple[int, ...]  # patches of each window
    borders: torch.Tensor  # first patch of each window, and the end of the last, on the tower's device, int32 [N + 1]


def install_vision_attention(tower: torch.nn.Module) -> None:
    """Let a Qwen-VL tower take grids in CPU memory, project patches by a matrix product, and attend in few calls.

    Only SDPA is replaced by `vision_attention`; another attention stays.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, vision_attention)
    config: Any = tower.config
    if config._attn_implementation == "sdpa":
        config._attn_implementation = ATTENTION_NAME
    # On the instance: another model of the class keeps its own forward. `deepcopy` binds the method of a copy to the
    # copy.
    tower.forward = _forward.__get__(tower)
    projection: Any = tower.get_submodule("patch_embed.proj")
    if isinstance(projection, nn.Conv3d):
        projection.forward = _project_patches.__get__(projection)  # type: ignore[method-assign]


def vision_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: PatchWindows,
    max_length_q: int,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Attend, as an attention function of transformers; return the output [1, T, H, D] and no probabilities.

    One call of torch's variable-length kernel where there is one, else a call of SDPA for each different length.

    Args:
        module: the attention layer; not read.
        query: queries [1, H, T, D].
        key: keys [1, H, T, D].
        value: values [1, H, T, D].
        attention_mask: None.
        scaling: factor of query-key products, one divided by the square root of D.
        cu_seq_lens_q: the windows; transformers passes on what `_forward` gives as `cu_seqlens`.
        max_length_q: patches of the longest window.
        **options: transformers' other arguments.
    """
    query_THD, key_THD, value_THD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    lengths, borders = cu_seq_lens_q
    varlen_attn = _find_varlen_kernel(query)
    if varlen_attn is None:
        output_THD = _attend_by_length((query_THD, key_THD, value_THD), lengths, scaling)
    else:
        # torch 2.10 has no argument for the scale; its default is the scale of the towers.
        output_THD = varlen_attn(query_THD, key_THD, value_THD, borders, borders, max_length_q, max_length_q)
    return output_THD.unsqueeze(0), None


def _attend_by_length(tensors_THD: Sequence[torch.Tensor], lengths: Sequence[int], scaling: float) -> torch.Tensor:
    """Return the output [T, H, D] of queries, keys and values, with a call of SDPA for each length of a window."""
    # Runs of equal windows rather than windows: fewer pieces to cut and join.
    runs = [(length, length * len(list(run))) for length, run in groupby(lengths)]
    run_sizes = [size for _, size in runs]
    split_tensors = [torch.split(tensor_THD, run_sizes) for tensor_THD in tensors_THD]
    outputs: dict[int, torch.Tensor] = {}  # by number of the run
    for length in set(lengths):
        members = [number for number, run in enumerate(runs) if run[0] == length]
        batch = []
        for runs_THD in split_tensors:
            pieces = [runs_THD[number] for number in members]
            # `torch.cat` would copy a single tensor, here and below.
            joined = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
            batch.append(joined.view(-1, length, *joined.shape[1:]).transpose(1, 2))  # [windows, H, length, D]
        output = scaled_dot_product_attention(batch[0], batch[1], batch[2], scale=scaling)
        member_sizes = [run_sizes[number] for number in members]
        member_outputs = torch.split(output.transpose(1, 2).flatten(0, 1), member_sizes)
        outputs |= zip(members, member_outputs, strict=True)
    in_order = [outputs[number] for number in range(len(runs))]
    return torch.cat(in_order) if len(in_order) > 1 else in_order[0]


def _find_varlen_kernel(query: torch.Tensor) -> Callable[..., Any] | None:
    """Return torch's variable-length attention; None for a CPU, for float32 and for torch 2.9, which do not have it."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def _forward(self: Any, hidden_states: torch.Tensor, grid_thw: torch.Tensor, **options: object) -> ModelOutput:  # noqa: ANN401
    """Return the tower's output for patches [T, values] cut by grids [I, 3], int64.

    transformers needs the grids on the tower's device, and waits for that device at each index that it computes from
    them. Here the CPU computes all indices first, and then sends them.
    """
    from transformers import vision_utils

    grids_I3 = grid_thw.cpu()
    merge_size = self.spatial_merge_size
    # By the names of the tower's arguments that replace its own computation.
    indices = {
        "position_ids": vision_utils.get_vision_position_ids(grids_I3, merge_size),
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grids_I3),
    }
    if hasattr(self, "window_size"):
        indices["window_index"], indices["cu_window_seqlens"] = vision_utils.get_vision_window_index(
            grids_I3, spatial_merge_size=merge_size, window_size=self.window_size, patch_size=self.patch_size
        )
    if hasattr(self, "num_grid_per_side"):
        indices["interp_indices"], indices["interp_weights"] = (
            vision_utils.get_vision_interpolation_indices_and_weights(
                grids_I3,
                num_grid_per_side=self.num_grid_per_side,
                mode=self.interpolation_mode,
                align_corners=self.interpolation_align_corners,
                spatial_merge_size=merge_size,
            )
        )
    inputs: dict[str, Any] = {name: send(tensor, hidden_states.device) for name, tensor in indices.items()}
    if self.config._attn_implementation == ATTENTION_NAME:
        for borders, longest in (("cu_seqlens", "max_seqlen"), ("cu_window_seqlens", "max_window_seqlen")):
            if borders in indices:
                lengths = tuple(indices[borders].diff().tolist())
                inputs[borders], inputs[longest] = PatchWindows(lengths, inputs[borders]), max(lengths)
    output: ModelOutput = type(self).forward(self, hidden_states, grid_thw=grid_thw, **inputs, **options)
    return output


def _project_patches(self: Any, patches: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Return the hidden states [T, W, 1, 1, 1] of patches [T, channels, frames, rows, columns].

    The kernel covers a whole patch, so this is a matrix product. As a convolution it takes five times as long on a CPU,
    and on GPUs in bfloat16 up to thousands of times: issue 45750 of transformers.
    """
    return linear(patches.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]
