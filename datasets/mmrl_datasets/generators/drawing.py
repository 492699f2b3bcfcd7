"""Drawing shared by the generators: compositions, box placement, backgrounds, shapes and handwriting."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageDraw

from mmrl.types import UserError
from mmrl_datasets.generators.photos import HandwrittenDigit, Split, random_crop

Box = tuple[int, int, int, int]  # x1, y1 (inclusive), x2, y2 (exclusive), in pixels
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
SHAPE_COLOURS: Final = ("red", "green", "blue", "yellow")
SHAPES: Final = ("disc", "square", "triangle")
SCENE_GREY: Final = 128  # grey level (0 to 255) that the background of a scene fades to
PAPER_GREY: Final = 224  # grey level that the background of handwriting fades to
PRINT_PAPER_GREY: Final = 232  # grey level that the background of printed text fades to
INK_COLOR: Final = (24, 28, 64)  # RGB of handwriting and printed text
SUPERSAMPLING: Final = 4  # shapes and text are drawn this many times larger and then shrunk, which smooths their edges
# A split keeps at least one composition in ten, and some draws place no composition at all.
MAX_DRAWS: Final = 5000


class SceneObject(NamedTuple):
    """A named object in an image and the box that it fills."""

    name: str
    box: Box

    def __repr__(self) -> str:
        """Return the text that `draw_composition` hashes, which is fixed: another would move scenes between splits."""
        return f"Thing(name={self.name!r}, box={self.box!r})"


def choose(rng: np.random.Generator, options: Sequence[_OptionT]) -> _OptionT:
    """Return a random option, each equally likely."""
    # For a few options `rng.choice` takes longer to make its array than to draw from it.
    return options[int(rng.integers(len(options)))]


def choose_with_replacement(rng: np.random.Generator, options: Sequence[_OptionT], count: int) -> list[_OptionT]:
    """Return `count` random options, each equally likely; an option may come several times."""
    return [choose(rng, options) for _ in range(count)]


def shuffle(rng: np.random.Generator, options: Sequence[_OptionT]) -> list[_OptionT]:
    """Return the options in random order; the first n of them are a draw without replacement."""
    return [options[int(index)] for index in rng.permutation(len(options))]


def draw_composition(split: Split, draw: Callable[[], Sequence[_FactT] | None]) -> Sequence[_FactT]:
    """Call `draw` until it returns a composition that belongs to `split`, and return that.

    A composition is a sequence of facts, such as objects with their boxes. It belongs to one split, by its hash: 80 %
    to train, 10 % each to validation and test. `draw` returns None when its objects did not fit into the image.

    Raises:
        UserError: no composition was found in `MAX_DRAWS` calls.
    """
    for _ in range(MAX_DRAWS):
        facts = draw()
        if facts is None:
            continue
        # A hash, not a random number: the same composition is found again in other samples, and under other seeds.
        # Sorted, because a scene looks the same in whatever order its objects were drawn.
        tenth = hashlib.sha256(repr(sorted(facts)).encode()).digest()[0] % 10
        if {0: "test", 1: "validation"}.get(tenth, "train") == split:
            return facts
    raise UserError("the objects do not fit into the image; use fewer of them or a larger `image_px`")


def place_boxes(
    rng: np.random.Generator, extents: Sequence[tuple[int, int]], *, image_px: int, step: int, gap: int
) -> list[Box] | None:
    """Place boxes of these widths and heights at random in a square image; None if one does not fit in 20 tries.

    Corners lie at multiples of `step` pixels, and two boxes at least `gap` pixels apart.
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
            # The caller draws everything anew. Trying on with these boxes would favour some compositions.
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
    rng: np.random.Generator, textures: Sequence[Image.Image], image_px: int, strength: float, grey: int
) -> Image.Image:
    """Return a square crop of a random texture, blended with plain grey: `strength` 1 is the texture, 0 the grey."""
    crop = random_crop(rng, choose(rng, textures), image_px, image_px)
    return Image.blend(Image.new("RGB", crop.size, (grey, grey, grey)), crop, strength)


def paste_digits(
    canvas: Image.Image, handwriting: Sequence[HandwrittenDigit], chosen: Sequence[int], boxes: Sequence[Box]
) -> list[SceneObject]:
    """Paste the `chosen` digits in `INK_COLOR`, each resized to its box, and return them as objects named by value."""
    digits = []
    for index, box in zip(chosen, boxes, strict=True):
        digit = handwriting[index]
        extent = (box[2] - box[0], box[3] - box[1])
        # The ink is the mask: paper stays as it is, full ink is covered by the colour.
        canvas.paste(INK_COLOR, box, digit.ink.resize(extent, Image.Resampling.BICUBIC))
        digits.append(SceneObject(str(digit.value), box))
    return digits


def draw_shape(canvas: Image.Image, shape_object: SceneObject) -> None:
    """Draw an object named "<colour> <shape>" so that it touches all four sides of its box."""
    colour, shape = shape_object.name.split()
    x1, y1, x2, y2 = shape_object.box
    canvas.paste(COLOURS[colour], (x1, y1), _shape_mask(shape, x2 - x1, y2 - y1))


@lru_cache(maxsize=64)
def _shape_mask(shape: str, width: int, height: int) -> Image.Image:
    # Cached, because scenes draw few shapes in few sizes. Each pixel is how much of it the shape covers, 0 to 255.
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
    return stencil.resize((width, height), Image.Resampling.BOX)


def _too_close(box: Box, other: Box, gap: int) -> bool:
    overlap_x = box[0] < other[2] + gap and other[0] < box[2] + gap
    overlap_y = box[1] < other[3] + gap and other[1] < box[3] + gap
    return overlap_x and overlap_y
