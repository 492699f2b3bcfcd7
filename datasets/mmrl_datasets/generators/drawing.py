"""Drawing shared by the generators: shapes, pasted photographs, backgrounds, box placement, and PNG files."""

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
from mmrl_datasets.generators.photos import HandwrittenDigit, Split, random_crop

Box = tuple[int, int, int, int]
"""x1, y1 (inclusive), x2, y2 (exclusive), in pixels."""
# The facts that make up a composition. They sort, and their repr is the same in every process.
_FactT = TypeVar("_FactT", bound=tuple[Any, ...] | str)
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
SCENE_GREY: Final = 128
"""Grey level (0 to 255) that the background of a scene fades to."""
PAPER_GREY: Final = 224
"""Grey level that the background of handwriting fades to."""
PRINT_PAPER_GREY: Final = 232
"""Grey level that the background of printed text fades to."""
INK_COLOR: Final = (24, 28, 64)
"""RGB of handwriting and printed text."""
SUPERSAMPLING: Final = 4
"""Shapes and text are drawn this many times larger and then shrunk, which smooths their edges."""
# A split keeps at least one composition in ten, and some draws place no composition at all.
MAX_DRAWS: Final = 5000


class SceneObject(NamedTuple):
    """A named object in an image and the box that it fills."""

    name: str
    box: Box

    def __repr__(self) -> str:
        """Return the text that `assign_split` hashes. It is fixed: another text would move scenes between splits."""
        return f"Thing(name={self.name!r}, box={self.box!r})"


def choose_with_replacement(rng: np.random.Generator, options: Sequence[_OptionT], count: int) -> list[_OptionT]:
    """Return `count` random options, each equally likely; an option may come several times."""
    # For a few options `rng.choice` takes longer to make its array than to draw from it.
    return [options[int(rng.integers(len(options)))] for _ in range(count)]


def assign_split(facts: Sequence[_FactT]) -> Split:
    """Return the only split in which a composition may occur: by its hash, 80 % train, 10 % validation, 10 % test."""
    tenth = hashlib.sha256(repr(sorted(facts)).encode()).digest()[0] % 10
    match tenth:
        case 0:
            return "test"
        case 1:
            return "validation"
        case _:
            return "train"


def draw_composition(split: Split, draw: Callable[[], Sequence[_FactT] | None]) -> Sequence[_FactT]:
    """Call `draw` until it returns a composition that belongs to `split`.

    A composition is a sequence of facts, such as objects with their boxes. `draw` returns None when its objects did not
    fit into the image.

    Raises:
        UserError: no composition was found in `MAX_DRAWS` calls.
    """
    for _ in range(MAX_DRAWS):
        facts = draw()
        if facts is not None and assign_split(facts) == split:
            return facts
    raise UserError("the objects find no room in the image; use fewer of them or a larger `image_px`")


def place_boxes(
    rng: np.random.Generator, extents: Sequence[tuple[int, int]], *, image_px: int, step: int, gap: int
) -> list[Box] | None:
    """Place boxes at random in a square image, or return None if one of them finds no room in 20 tries.

    Args:
        rng: the generator that the positions are drawn from.
        extents: width and height of each box, in pixels.
        image_px: side of the image.
        step: corners lie on a grid of this many pixels.
        gap: least distance between two boxes, in pixels.
    """
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


def place_in_line(rng: np.random.Generator, count: int, slot_px: int, image_px: int) -> list[Box]:
    """Place square boxes from left to right, one in each slot of `slot_px` pixels, each at its own height and size."""
    start = int(rng.integers(image_px - count * slot_px + 1))
    boxes = []
    for position in range(count):
        side = int(rng.integers(slot_px * 5 // 6, slot_px + 1))
        x = start + position * slot_px + int(rng.integers(slot_px - side + 1))
        y = int(rng.integers(image_px - side + 1))
        boxes.append((x, y, x + side, y + side))
    return boxes


def make_background(
    rng: np.random.Generator, textures: Sequence[Image.Image], *, image_px: int, strength: float, grey: int
) -> Image.Image:
    """Return a square crop of a random texture, blended with plain grey: `strength` 1 is the texture, 0 the grey."""
    crop = random_crop(rng, textures[int(rng.integers(len(textures)))], image_px, image_px)
    return Image.blend(_plain_image(crop.size, grey), crop, strength)


def paste_photo(canvas: Image.Image, photo: Image.Image, box: Box) -> None:
    """Paste a photo with a thin white margin; photo and margin together fill the box."""
    margin = max(1, canvas.width // 64)
    x1, y1, x2, y2 = box
    inner = (x1 + margin, y1 + margin, x2 - margin, y2 - margin)
    canvas.paste(COLOURS["white"], box)
    canvas.paste(photo.resize((inner[2] - inner[0], inner[3] - inner[1])), inner)


def paste_digits(
    canvas: Image.Image, handwriting: Sequence[HandwrittenDigit], chosen: Sequence[int], boxes: Sequence[Box]
) -> list[SceneObject]:
    """Paste handwritten digits, each resized to its box, in `INK_COLOR`.

    Args:
        canvas: the image.
        handwriting: the digits to choose from.
        chosen: an index into them for each box.
        boxes: the boxes, in pixels.

    Returns:
        The digits as objects, named by their values.
    """
    digits = []
    for index, box in zip(chosen, boxes, strict=True):
        digit = handwriting[index]
        extent = (box[2] - box[0], box[3] - box[1])
        canvas.paste(INK_COLOR, box, digit.ink.resize(extent, Image.Resampling.BICUBIC))
        digits.append(SceneObject(str(digit.value), box))
    return digits


def draw_shape(canvas: Image.Image, shape_object: SceneObject) -> None:
    """Draw an object named "<colour> <shape>" so that it touches all four sides of its box."""
    colour, shape = shape_object.name.split()
    x1, y1, x2, y2 = shape_object.box
    canvas.paste(COLOURS[colour], (x1, y1), _shape_mask(shape, x2 - x1, y2 - y1))


def save_png(image: Image.Image, folder: Path, stem: str) -> ImageRef:
    """Write an image to `folder`/`stem`-DIGEST.png and return the reference to it.

    The name carries the start of the digest, so another image never takes the place of this one.

    Raises:
        UserError: the file cannot be written.
    """
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    content = buffer.getvalue()
    digest = hashlib.sha256(content).hexdigest()
    path = folder / f"{stem}-{digest[:8]}.png"
    write_if_changed(path, content)
    return ImageRef(path=str(path), sha256=digest)


@lru_cache(maxsize=64)
def _shape_mask(shape: str, width: int, height: int) -> Image.Image:
    """Return the coverage (mode L, 0 to 255) of each pixel by a shape that fills a box of this size."""
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


def _too_close(box: Box, other: Box, gap: int) -> bool:
    overlap_x = box[0] < other[2] + gap and other[0] < box[2] + gap
    overlap_y = box[1] < other[3] + gap and other[1] < box[3] + gap
    return overlap_x and overlap_y
