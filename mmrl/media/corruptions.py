"""What hides a picture or a video: the same size, and nothing to see; the same each time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from PIL import Image

from mmrl.media.video import DecodedVideo
from mmrl.types import Corruption, MediaRef

_GREY = 128


def corrupt_image(picture: Image.Image, ref: MediaRef) -> Image.Image:
    """An RGB picture as the veil of its reference leaves it; a single picture has no frames to shuffle."""
    match ref.corruption:
        case Corruption.GREY:
            return Image.new("RGB", picture.size, (_GREY,) * 3)
        case Corruption.NOISE:
            noise = _make_rng(ref).integers(0, 256, (picture.height, picture.width, 3), dtype=np.uint8)
            return Image.fromarray(noise)
        case _:
            return picture


def corrupt_video(clip: DecodedVideo, ref: MediaRef) -> DecodedVideo:
    """The frames of a video as the veil of its reference leaves them; the times at which they count stay."""
    frames = clip.frames_TCHW
    match ref.corruption:
        case None:
            return clip
        case Corruption.GREY:
            hidden = torch.full_like(frames, float(_GREY))
        case Corruption.NOISE:
            noise = _make_rng(ref).integers(0, 256, tuple(frames.shape), dtype=np.uint8)
            hidden = torch.from_numpy(noise).to(frames.dtype)
        case Corruption.SHUFFLED:
            hidden = frames[_different_order(len(frames), _make_rng(ref))]
    return replace(clip, frames_TCHW=hidden)


def _different_order(count: int, chance: np.random.Generator) -> torch.Tensor:
    """Another order of so many frames, if there is one."""
    order = torch.from_numpy(chance.permutation(count))
    return order.roll(1) if torch.equal(order, torch.arange(count)) else order


def _make_rng(ref: MediaRef) -> np.random.Generator:
    return np.random.default_rng(list(f"{ref.path} {ref.sha256}".encode()))
