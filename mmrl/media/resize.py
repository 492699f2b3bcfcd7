"""The resize rule of the Qwen-VL families, which is that of `qwen_vl_utils`."""

from __future__ import annotations

from mmrl.types import Size


def resized_size(size: Size, *, factor: int, min_pixels: int, max_pixels: float) -> Size:
    """Return the size that an image is resized to.

    Its sides are multiples of `factor`, its area lies within the limits, and its aspect ratio is nearly kept.
    """
    # qwen-vl-utils imports torchvision, which takes seconds: a process that resizes nothing does not wait for it.
    from qwen_vl_utils.vision_process import smart_resize

    height, width = smart_resize(size.height, size.width, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
    return Size(width, height)
