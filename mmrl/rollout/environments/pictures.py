"""Pixels as PNG files, for adapters of environments that return arrays."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from mmrl.config.schema import MediaLimitsConfig
from mmrl.types import UserError


def encode_png(pixels: object) -> bytes:
    """Return pixels as a PNG file: uint8 [height, width, 3], as an array or nested lists of numbers.

    Raises:
        UserError: shape or type differ, or there are more pixels than the default of `data.media_limits.max_pixels`.
    """
    array = np.asarray(pixels)
    # Encoding a huge picture would exceed the deadline. A lower limit in the config is checked when it is opened.
    limit = MediaLimitsConfig().max_pixels
    if array.size > 3 * limit:
        raise UserError(f"a picture of {list(array.shape)} exceeds {limit:,} pixels; draw a smaller one")
    is_integer = np.issubdtype(array.dtype, np.integer) and array.size > 0
    if array.ndim != 3 or array.shape[2] != 3 or not is_integer or array.min() < 0 or array.max() > 255:
        raise UserError(f"a picture is uint8 [height, width, 3], not {array.dtype} {list(array.shape)}")
    content = io.BytesIO()
    Image.fromarray(array.astype(np.uint8)).save(content, "png")
    return content.getvalue()
