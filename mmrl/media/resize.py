"""The resize rule of the Qwen-VL families, qwen-vl-utils' own, and pictures resized by it."""

from __future__ import annotations

from PIL import Image
from qwen_vl_utils.vision_process import smart_resize

from mmrl.types import Size


def resized_size(size: Size, *, factor: int, min_pixels: int, max_pixels: float) -> Size:
    """The size a picture is resized to: sides multiples of `factor`, area within limits, shape nearly kept."""
    height, width = smart_resize(size.height, size.width, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
    return Size(width, height)


def resize_image(picture: Image.Image, *, factor: int, min_pixels: int, max_pixels: int) -> Image.Image:
    """The picture at its fitted size, as qwen-vl-utils' `fetch_image` resizes it."""
    size = Size(*picture.size)
    fitted = resized_size(size, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
    return picture if fitted == size else picture.resize(fitted)
