"""Real photographs and handwritten digits from installed packages, cut so that no two splits share a pixel."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from math import ceil, prod
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
import skimage.data
from numpy.typing import NDArray
from PIL import Image
from skimage.io import imread

from mmrl.types import UserError

Split = Literal["train", "validation", "test"]
SPLITS: Final[tuple[Split, ...]] = get_args(Split)
SPLIT_RANGES: Final = {"train": (0.0, 0.6), "validation": (0.6, 0.8), "test": (0.8, 1.0)}
"""The fraction of a photograph's columns, or of the handwritten digits, where each split begins and ends."""
MAX_ZOOM: Final = 4 / 3  # side of the largest region that a crop shrinks, in sides of the crop


class HandwrittenDigit(NamedTuple):
    """One handwritten digit."""

    ink: Image.Image  # 8 x 8 pixels, mode L: 0 is paper, 255 full ink
    value: int  # 0 to 9


def split_slice(split: Split, count: int) -> slice:
    """Return the slice of `count` items that belongs to a split: the first 60 %, the next 20 % or the last 20 %."""
    start, stop = SPLIT_RANGES[split]
    return slice(round(start * count), round(stop * count))


@lru_cache(maxsize=1)
def load_textures(split: Split, patch_px: int) -> tuple[Image.Image, ...]:
    """Return photographs for backgrounds: the columns of this split, RGB, scaled for crops of up to `patch_px`."""
    china = _load_photo("china")
    photographs = skimage.data.brick(), skimage.data.grass(), skimage.data.gravel(), skimage.data.coffee(), china
    return tuple(split_region(photograph, split, patch_px) for photograph in photographs)


def load_materials(split: Split, patch_px: int) -> dict[str, Image.Image]:
    """Return photographs by name, each of a material that any crop of it shows, scaled like `load_textures`."""
    flower = _load_photo("flower")
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
    """Return photographs whose regions differ from one another, for puzzles: scaled like `load_textures`."""
    scenes = (
        *(skimage.data.astronaut(), skimage.data.chelsea(), skimage.data.coffee(), skimage.data.coins()),
        *(skimage.data.rocket(), _load_photo("china"), _load_photo("flower")),
    )
    return [split_region(scene, split, patch_px) for scene in scenes]


def load_handwritten_digits(split: Split) -> list[HandwrittenDigit]:
    """Return the handwritten digits of a split.

    The data set is in order of its writers, so a slice of it keeps most of one writer's digits in one split.
    """
    # A row has the 64 levels of ink of a digit, 0 to 16, and the digit.
    rows = np.loadtxt(_sklearn_data() / "data" / "digits.csv.gz", delimiter=",")
    chosen = rows[split_slice(split, len(rows))]
    ink_levels = (chosen[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    values = map(int, chosen[:, -1])
    return list(map(HandwrittenDigit, map(Image.fromarray, ink_levels), values))


def split_region(photograph: NDArray[np.uint8], split: Split, patch_px: int) -> Image.Image:
    """Return the columns of a photograph that belong to a split, as RGB.

    All splits are scaled by one factor, which makes the narrowest `MAX_ZOOM` patches wide.
    """
    width = photograph.shape[1]
    narrowest = min(len(range(width)[split_slice(other, width)]) for other in SPLITS)
    scale = MAX_ZOOM * patch_px / narrowest
    columns = Image.fromarray(photograph[:, split_slice(split, width)]).convert("RGB")
    extent = ceil(scale * columns.width), ceil(scale * columns.height)
    if prod(extent) > 500_000_000:  # they take 1.5 GB, and there are several photographs
        place = f"crops of {patch_px} pixels a side take photographs of {prod(extent):,} pixels"
        raise UserError(f"{place}, more than 500,000,000; use a smaller `image_px`")
    return columns.resize(extent, Image.Resampling.BICUBIC)


def random_crop(rng: np.random.Generator, image: Image.Image, width: int, height: int) -> Image.Image:
    """Return a random region of an image, 1 to `MAX_ZOOM` times as large as wanted, shrunk to `width` x `height`."""
    zoom = rng.uniform(1.0, min(MAX_ZOOM, image.width / width, image.height / height))
    left = rng.uniform(0, image.width - zoom * width)
    top = rng.uniform(0, image.height - zoom * height)
    region = (left, top, left + zoom * width, top + zoom * height)
    return image.resize((width, height), Image.Resampling.BICUBIC, box=region)


def _load_photo(name: str) -> NDArray[np.uint8]:
    """Return a photograph that comes with scikit-learn: uint8 [height, width, 3]."""
    return np.asarray(imread(_sklearn_data() / "images" / f"{name}.jpg"))


def _sklearn_data() -> Path:
    """Return the folder of scikit-learn's data sets. Importing its loaders would take two seconds."""
    spec = find_spec("sklearn")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "datasets"
