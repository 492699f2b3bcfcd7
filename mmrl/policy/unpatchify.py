"""Patches back to pixels, to show people what the model is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers.image_processing_utils import BaseImageProcessor


def unpatchify(patches_MD: torch.Tensor, grid: tuple[int, int, int], processor: BaseImageProcessor) -> torch.Tensor:
    """Return the frames that patches were cut from, uint8 [frames, height, width, 3] in pixels.

    Inverts Qwen2VLImageProcessor of transformers 5: patches stand in blocks of merge x merge, and hold channels,
    frames, rows and columns in this order, normalised by the processor's mean and deviation.

    Args:
        patches_MD: M patches of D values, float32. An image was repeated to fill a pair, so its frames are equal.
        grid: time, height and width in patches, time in pairs of frames.
        processor: the image processor that cut the patches.
    """
    merge, side, pair = processor.merge_size, processor.patch_size, processor.temporal_patch_size
    time, height, width = grid
    blocks = patches_MD.reshape(time, height // merge, width // merge, merge, merge, 3, pair, side, side)
    # To time, frame of the pair; then block, patch and pixel row; then block, patch and pixel column; then channel.
    frames = blocks.permute(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(time * pair, height * side, width * side, 3)
    scaled = frames.float() * torch.tensor(processor.image_std) + torch.tensor(processor.image_mean)
    return (scaled * 255).round().clamp(0, 255).to(torch.uint8)
