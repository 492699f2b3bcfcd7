"""Pixels as PNG files, for adapters of environments that return arrays."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from mmrl.types import UserError


def encode_png(pixels: object) -> bytes:
    """Return pixels as a PNG file: uint8 [height, width, 3], as an array or nested lists of numbers.

    Raises:
        UserError: they have another shape or type.
    """
    array = np.asarray(pixels)
    is_integer = np.issubdtype(array.dtype, np.integer) and array.size > 0
    if array.ndim != 3 or array.shape[2] != 3 or not is_integer or array.min() < 0 or array.max() > 255:
        raise UserError(f"a picture is uint8 [height, width, 3], not {array.dtype} {list(array.shape)}")
    content = io.BytesIO()
    Image.fromarray(array.astype(np.uint8)).save(content, "png")
    return content.getvalue()
