"""Text and pictures in the forms that other environments return them, for their adapters."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from PIL import Image

from mmrl.config.schema import MediaLimitsConfig
from mmrl.types import Observation, UserError


def observe_blocks(blocks: Iterable[Mapping[str, Any]], separator: str = "") -> Observation:
    """Return the content blocks of a chat message as an observation: texts, and pictures of type image or image_url."""
    texts, media = [], []
    for block in blocks:
        if block["type"] == "text":
            texts.append(block["text"])
        elif block["type"] == "image":
            media.append(encode_picture(block["image"]))
        elif block["type"] == "image_url":  # later versions of verifiers have objects here that are not dictionaries
            media.append(encode_picture(block["image_url"]["url"]))
    return Observation(text=separator.join(texts), media=tuple(media))


def encode_picture(picture: object) -> bytes:
    """Return a picture as a PNG or JPEG file: from its bytes, base64, a data URL, a Pillow image, or pixels.

    Pixels are uint8 [height, width, 3], as an array or nested lists of numbers. Raises UserError for any others, and
    for more than the default of `data.media_limits.max_pixels`.
    """
    if isinstance(picture, bytes):
        return picture
    if isinstance(picture, str):
        return base64.b64decode(picture.partition("base64,")[2] or picture)
    if not isinstance(picture, Image.Image):
        array = np.asarray(picture)
        # Encoding a huge picture would exceed the deadline. A lower limit in the config is checked when it is opened.
        limit = MediaLimitsConfig().max_pixels
        if array.size > 3 * limit:
            raise UserError(f"a picture of {list(array.shape)} exceeds {limit:,} pixels; draw a smaller one")
        is_integer = np.issubdtype(array.dtype, np.integer) and array.size > 0
        if array.ndim != 3 or array.shape[2] != 3 or not is_integer or array.min() < 0 or array.max() > 255:
            raise UserError(f"a picture is uint8 [height, width, 3], not {array.dtype} {list(array.shape)}")
        picture = Image.fromarray(array.astype(np.uint8))
    content = io.BytesIO()
    picture.save(content, "png")
    return content.getvalue()


def finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers among `values`, for `StepResult.info`."""
    numbers = {}
    for name, value in values.items():
        if isinstance(value, int | float | np.number | np.bool_) and np.isfinite(value):
            numbers[name] = float(value)
    return numbers
