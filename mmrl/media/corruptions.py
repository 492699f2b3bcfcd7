"""Hide the content of an image or video from a model, to measure whether its answers depend on it.

The size stays, so that the prompt has as many visual tokens as before. The result is the same each time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image

from mmrl.types import Corruption, MediaRef

if TYPE_CHECKING:
    from mmrl.media.video import DecodedVideo

_GREY_LEVEL: Final = 128


def corrupt_image(image: Image.Image, ref: MediaRef) -> Image.Image:
    """Return an RGB image with the corruption of its reference applied; an image has no frames to shuffle."""
    match ref.corruption:
        case Corruption.GREY:
            return Image.new("RGB", image.size, (_GREY_LEVEL,) * 3)
        case Corruption.NOISE:
            noise = _make_rng(ref).integers(0, 256, (image.height, image.width, 3), dtype=np.uint8)
            return Image.fromarray(noise)
        case _:
            return image


def corrupt_video(video: DecodedVideo, ref: MediaRef) -> DecodedVideo:
    """Return a video with the corruption of its reference applied to its frames. Their timestamps stay."""
    # Importing torch takes seconds, and a process that opens only images does not need it.
    import torch

    frames = video.frames_TCHW
    match ref.corruption:
        case None:
            return video
        case Corruption.GREY:
            corrupted = torch.full_like(frames, float(_GREY_LEVEL))
        case Corruption.NOISE:
            noise = _make_rng(ref).integers(0, 256, tuple(frames.shape), dtype=np.uint8)
            corrupted = torch.from_numpy(noise).to(frames.dtype)
        case Corruption.SHUFFLED:
            order = torch.from_numpy(_make_rng(ref).permutation(len(frames)))
            # A shuffle that happens to change nothing would hide nothing.
            if torch.equal(order, torch.arange(len(frames))):
                order = order.roll(1)
            corrupted = frames[order]
    return replace(video, frames_TCHW=corrupted)


def _make_rng(ref: MediaRef) -> np.random.Generator:
    """Return a generator that depends only on the file, so that a resumed run sees the same corruption."""
    return np.random.default_rng(list(f"{ref.path} {ref.sha256}".encode()))
