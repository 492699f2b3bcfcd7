"""What the scene generators share: boxes that do not overlap, held-out compositions, PNG files."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageDraw

from mmrl.types import ImageRef, UserError
from mmrl_datasets.file_writes import write_if_changed
from mmrl_datasets.generators.photos import Split, random_crop

Box = tuple[int, int, int, int]
_FactT = TypeVar("_FactT", bound=tuple[Any, ...] | str)  # sorts, and its repr is the same in every process
_OptionT = TypeVar("_OptionT")

COLOURS: Final[Mapping[str, tuple[int, int, int]]] = {
    "red": (226, 32, 38),
    "green": (30, 160, 60),
    "blue": (36, 84, 220),
    "yellow": (248, 208, 24),
    "purple": (150, 50, 190),
    "white": (250, 250, 250),
}
SHAPES: Final = ("disc", "square", "triangle")
SUPERSAMPLING: Final = 4  # shapes are drawn this much larger, then shrunk: smooth edges
MAX_DRAWS: Final = 5000  # of a layout; a composition falls into a split by chance, one in ten into the rarest


class SceneObject(NamedTuple):
    """A named thing and the pixels it fills: x1, y1 inclusive, x2, y2 exclusive."""

    name: str
    box: Box

    def __repr__(self) -> str:
        """Return the text that `assign_split` hashes. It is fixed here: another text would move scenes between splits."""
        return f"Thing(name={self.name!r}, box={self.box!r})"


def choose_with_replacement(rng: np.random.Generator, options: Sequence[_OptionT], count: int) -> list[_OptionT]:
    """Options, each equally often; one may come again. For a few, numpy takes longer to make an array than to draw."""
    return [options[int(rng.integers(len(options)))] for _ in range(count)]


def assign_split(facts: Sequence[_FactT]) -> Split:
    """The one split a composition may occur in, by a hash of what stands where: 80 % train, 10 % each of the others."""
    tenth = hashlib.sha256(repr(sorted(facts)).encode()).digest()[0] % 10
    return "test" if tenth == 0 else "validation" if tenth == 1 else "train"


def draw_composition(split: Split, draw: Callable[[], Sequence[_FactT] | None]) -> Sequence[_FactT]:
    """Draw compositions (things, or other facts that make them up) until one exists (is not None) and belongs here.

    Raises:
        UserError: things of this number and size find no room.
    """
    for _ in range(MAX_DRAWS):
        facts = draw()
        if facts is not None and assign_split(facts) == split:
            return facts
    raise UserError("the things find no room in the picture; use fewer of them or a larger `image_px`")


def place_boxes(
    rng: np.random.Generator, extents: Sequence[tuple[int, int]], *, image_px: int, step: int, gap: int
) -> list[Box] | None:
    """Boxes of these widths and heights at random corners on a grid of `step`, `gap` pixels apart; None if stuck."""
    boxes: list[Box] = []
    for width, height in extents:
        for _ in range(20):
            left = step * int(rng.integers((image_px - width) // step + 1))
            top = step * int(rng.integers((image_px - height) // step + 1))
            box = (left, top, left + width, top + height)
            if not any(_too_close(box, other, gap) for other in boxes):
                boxes.append(box)
                break
        else:
            return None
    return boxes


def make_background(
    rng: np.random.Generator, textures: Sequence[Image.Image], *, image_px: int, strength: float, grey: int
) -> Image.Image:
    """A square patch of a real texture, faded towards `grey`: `strength` 1 keeps it, 0 leaves plain grey."""
    patch = random_crop(rng, textures[int(rng.integers(len(textures)))], image_px, image_px)
    return Image.blend(_plain_image(patch.size, grey), patch, strength)


def paste_photo(canvas: Image.Image, photo: Image.Image, box: Box) -> None:
    """Paste a photo like a print with a thin white margin; both together fill the box."""
    margin = max(1, canvas.width // 64)
    x1, y1, x2, y2 = box
    inner = (x1 + margin, y1 + margin, x2 - margin, y2 - margin)
    canvas.paste(COLOURS["white"], box)
    canvas.paste(photo.resize((inner[2] - inner[0], inner[3] - inner[1])), inner)


def draw_shape(canvas: Image.Image, shape_object: SceneObject) -> None:
    """Draw a thing named "<colour> <shape>" so that it touches all four sides of its box."""
    colour, shape = shape_object.name.split()
    x1, y1, x2, y2 = shape_object.box
    canvas.paste(COLOURS[colour], (x1, y1), _shape_mask(shape, x2 - x1, y2 - y1))


def save_png(picture: Image.Image, folder: Path, stem: str) -> ImageRef:
    """Write a picture once; its name carries the start of its digest, so another picture never takes its place.

    Raises:
        UserError: the file cannot be written.
    """
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    content = buffer.getvalue()
    digest = hashlib.sha256(content).hexdigest()
    path = folder / f"{stem}-{digest[:8]}.png"
    write_if_changed(path, content)
    return ImageRef(path=str(path), sha256=digest)


@lru_cache(maxsize=64)
def _shape_mask(shape: str, width: int, height: int) -> Image.Image:
    """How much of each pixel a shape covers that fills a box of this size."""
    stencil = Image.new("L", (width * SUPERSAMPLING, height * SUPERSAMPLING))
    draw = ImageDraw.Draw(stencil)
    right, bottom = stencil.width - 1, stencil.height - 1
    match shape:
        case "disc":
            draw.ellipse((0, 0, right, bottom), fill=255)
        case "square":
            draw.rectangle((0, 0, right, bottom), fill=255)
        case "triangle":
            draw.polygon(((right / 2, 0), (right, bottom), (0, bottom)), fill=255)
        case _:
            raise ValueError(f"no shape is called {shape!r}; there are {', '.join(SHAPES)}")
    return stencil.resize((width, height), Image.Resampling.BOX)


@lru_cache(maxsize=8)
def _plain_image(size: tuple[int, int], grey: int) -> Image.Image:
    return Image.new("RGB", size, (grey, grey, grey))


def _too_close(a: Box, b: Box, gap: int) -> bool:
    return a[0] < b[2] + gap and b[0] < a[2] + gap and a[1] < b[3] + gap and b[1] < a[3] + gap
