"""Patches back to pixels: what the model is really given, for people to look at."""

from __future__ import annotations

import torch
from transformers.image_processing_utils import BaseImageProcessor


def unpatchify(patches_MD: torch.Tensor, grid: tuple[int, int, int], processor: BaseImageProcessor) -> torch.Tensor:
    """The frames that `patches_ND` were cut from, uint8 [T, H, W, 3]; of a picture, T equal ones.

    Inverts Qwen2VLImageProcessor of transformers 5: patches stand in blocks of merge x merge, and hold channels,
    frames, rows and columns in this order, normalised by the processor's mean and deviation. `grid` is (t, h, w) in
    patches.
    """
    merge, side, pair = processor.merge_size, processor.patch_size, processor.temporal_patch_size
    time, height, width = grid
    blocks = patches_MD.reshape(time, height // merge, width // merge, merge, merge, 3, pair, side, side)
    frames = blocks.permute(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(time * pair, height * side, width * side, 3)
    scaled = frames.float() * torch.tensor(processor.image_std) + torch.tensor(processor.image_mean)
    return (scaled * 255).round().clamp(0, 255).to(torch.uint8)
