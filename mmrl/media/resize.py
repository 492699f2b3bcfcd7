"""Resize images as `qwen_vl_utils` does for the Qwen-VL families."""

from __future__ import annotations

from PIL import Image
from qwen_vl_utils.vision_process import smart_resize

from mmrl.types import Size


def resized_size(size: Size, *, factor: int, min_pixels: int, max_pixels: float) -> Size:
    """Return the size that an image is resized to.

    Its sides are multiples of `factor`, its area lies within the limits, and its aspect ratio is nearly kept.
    """
    height, width = smart_resize(size.height, size.width, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
    return Size(width, height)


def resize_image(image: Image.Image, *, factor: int, min_pixels: int, max_pixels: int) -> Image.Image:
    """Return an image at its `resized_size`, resized as by `qwen_vl_utils.fetch_image`."""
    size = Size(*image.size)
    target_size = resized_size(size, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
    return image if target_size == size else image.resize(target_size)
