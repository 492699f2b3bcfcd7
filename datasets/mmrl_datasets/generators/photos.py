"""Real pictures that come with installed packages, each cut into parts that share no pixel between splits."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Final, Literal, get_args

import numpy as np
import skimage.data
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images

from mmrl.types import UserError

Split = Literal["train", "validation", "test"]
SPLITS: Final[tuple[Split, ...]] = get_args(Split)
SPLIT_RANGES: Final[dict[Split, tuple[float, float]]] = {
    "train": (0.0, 0.6),
    "validation": (0.6, 0.8),
    "test": (0.8, 1.0),
}
MAX_ZOOM: Final = 4 / 3  # room, in patch sizes, for a patch to move and grow


def parse_split(name: str) -> Split:
    """The split of that name.

    Raises:
        UserError: there is no such split.
    """
    for split in SPLITS:
        if split == name:
            return split
    raise UserError(f"split {name!r} does not exist; use one of {', '.join(SPLITS)}")


def split_slice(split: Split, count: int) -> slice:
    """Which of `count` things in a row belong to a split: the first 60 %, the next 20 %, or the last 20 %."""
    start, stop = SPLIT_RANGES[split]
    return slice(round(start * count), round(stop * count))


@lru_cache(maxsize=1)
def load_textures(split: Split, patch_px: int) -> tuple[Image.Image, ...]:
    """Backdrops: each photograph's own columns of the split, RGB, scaled for patches of up to `patch_px`."""
    china, _ = load_sample_images().images
    photographs = skimage.data.brick(), skimage.data.grass(), skimage.data.gravel(), skimage.data.coffee(), china
    return tuple(split_region(photograph, split, patch_px) for photograph in photographs)


def load_materials(split: Split, patch_px: int) -> dict[str, Image.Image]:
    """Things that any patch of them shows: each photograph's own columns of the split, RGB, scaled likewise."""
    _, flower = load_sample_images().images
    photographs = {
        "coins": skimage.data.coins(),
        "fur": skimage.data.chelsea()[20:280, 10:330],
        "petals": flower[120:280, 200:415],
        "retina": skimage.data.retina()[300:1100, 150:1250],
        "sky": skimage.data.rocket()[0:110, 150:540],
        "stars": skimage.data.hubble_deep_field(),
    }
    return {name: split_region(photograph, split, patch_px) for name, photograph in photographs.items()}


def load_scene_photos(split: Split, patch_px: int) -> list[Image.Image]:
    """Scenes whose parts look different: each photograph's own columns of the split, RGB, scaled likewise."""
    china, flower = load_sample_images().images
    scenes = (
        *(skimage.data.astronaut(), skimage.data.chelsea(), skimage.data.coffee(), skimage.data.coins()),
        *(skimage.data.rocket(), china, flower),
    )
    return [split_region(scene, split, patch_px) for scene in scenes]


def load_handwritten_digits(split: Split) -> tuple[list[Image.Image], list[int]]:
    """Handwritten digits as 8 x 8 ink (0 none, 255 full), and their values; runs by one writer stay together."""
    bunch = load_digits()
    chosen = split_slice(split, len(bunch.images))
    ink = (bunch.images[chosen] * (255 / 16)).astype(np.uint8)
    return [Image.fromarray(digit) for digit in ink], [int(digit) for digit in bunch.target[chosen]]


def split_region(photograph: NDArray[np.uint8], split: Split, patch_px: int) -> Image.Image:
    """A split's own columns of a photograph, scaled alike in all splits: the narrowest is `LOOSE` patches wide."""
    width = photograph.shape[1]
    narrowest = min(len(range(width)[split_slice(other, width)]) for other in SPLITS)
    scale = MAX_ZOOM * patch_px / narrowest
    columns = Image.fromarray(photograph[:, split_slice(split, width)]).convert("RGB")
    return columns.resize((ceil(scale * columns.width), ceil(scale * columns.height)), Image.Resampling.BICUBIC)


def random_crop(rng: np.random.Generator, picture: Image.Image, width: int, height: int) -> Image.Image:
    """A random patch of a picture, 1 to `LOOSE` times the wanted size, shrunk to `width` x `height` pixels."""
    zoom = rng.uniform(1.0, min(MAX_ZOOM, picture.width / width, picture.height / height))
    left = rng.uniform(0, picture.width - zoom * width)
    top = rng.uniform(0, picture.height - zoom * height)
    return picture.resize(
        (width, height), Image.Resampling.BICUBIC, box=(left, top, left + zoom * width, top + zoom * height)
    )
