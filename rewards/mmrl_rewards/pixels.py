"""Pixels as rewards and judges need them: the crop of an answer's box, a crop of the target's, and encoded images."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple, Unpack

import numpy as np
from PIL import Image

from mmrl.types import AnswerType, MediaRangeError, Response, Sample, Unscorable
from mmrl_rewards.contract import BadAnswer, answer_value, target_value
from mmrl_rewards.geometry import resize_map, target_to_pixels

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
ResultT = TypeVar("ResultT")
Inputs = TypeVarTuple("Inputs")
_JPEG_QUALITY = 90


def target_crop(response: Response, sample: Sample) -> Pixels:
    """Return the pixels inside the target's box: uint8 [height, width, 3], read-only.

    Raises:
        Unscorable: the target is not a box with a coordinate system, its image cannot be opened, or the box is not
            within the image.
    """
    box = target_to_pixels(response, sample, target_value(sample, AnswerType.BOX))
    try:
        return sample.crop(box, index=sample.target.media_index)
    except MediaRangeError as error:
        raise Unscorable(f"the target: {error}") from error


def answer_crop(response: Response, sample: Sample) -> Pixels:
    """Return the pixels inside the answer's box: uint8 [height, width, 3], read-only.

    Raises:
        BadAnswer: the answer is not a box, or the box is not within the image.
        Unscorable: the sample has no such image, or it cannot be opened.
    """
    index, resized = sample.target.media_index, resize_map(response, sample).resized
    # A sample is unscorable whatever the answer.
    sample.image(index)
    try:
        return sample.crop(answer_value(response), response.coordinate_system, index=index, resized=resized)
    except MediaRangeError as error:
        raise BadAnswer(str(error)) from error


def resize(pixels: Pixels, width: int, height: int, *, reducing_gap: float | None = None) -> Pixels:
    """Return pixels resized bicubically: uint8 [height, width, 3].

    With `reducing_gap`, a side at least twice that many times as long as the result's is first averaged over whole
    pixels, down to at least that many times as long.
    """
    # Pillow copies a part of a larger array byte by byte, and `fromarray` looks its type up.
    image = Image.frombuffer("RGB", pixels.shape[1::-1], np.ascontiguousarray(pixels), "raw", "RGB", 0, 1)
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=reducing_gap))


def keep_last(compute: Callable[[Unpack[Inputs]], ResultT]) -> Callable[[Unpack[Inputs]], ResultT]:
    """Return a function of images that returns its last result again for the same images, which siblings share.

    Images are the same if they are read-only and at the same address: while they are kept, no other array can be there.
    Comparing their pixels would take as long as computing most results.
    """
    kept: tuple[Sequence[object], tuple[object, ...], ResultT] | None = None

    def compute_or_keep(*inputs: *Inputs) -> ResultT:
        nonlocal kept
        key, last = [*map(_identify, inputs)], kept
        if last is None or last[0] != key:
            kept = last = key, inputs, compute(*inputs)
        return last[2]

    return compute_or_keep


def _identify(value: object) -> object:
    """Return a value, or the address and layout of a read-only array. A writeable one gets a key equal to no other."""
    if not isinstance(value, np.ndarray):
        return value
    return object() if value.flags.writeable else value.__array_interface__


def encode_image(pixels: Pixels, max_bytes: int) -> tuple[str, bytes]:
    """Return the media type and the bytes of an encoded image: a PNG, or if that has too many bytes, a JPEG.

    The JPEG is halved in size until it has at most `max_bytes`.

    Raises:
        ValueError: even one pixel has more bytes.
    """
    image = Image.fromarray(pixels)
    content = _encode(image, "PNG")
    if len(content) <= max_bytes:
        return "image/png", content
    while len(content := _encode(image, "JPEG")) > max_bytes:
        if image.size == (1, 1):
            raise ValueError(f"an image of one pixel has {len(content)} bytes, more than {max_bytes}")
        image = image.resize((max(1, image.width // 2), max(1, image.height // 2)), Image.Resampling.BOX)
    return "image/jpeg", content


def _encode(image: Image.Image, image_format: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, quality=_JPEG_QUALITY)
    return buffer.getvalue()
