"""Printed text to read: made-up words, numbers or mixed characters; turned, noisy and faint as the options ask.

The font is Aileron, which comes with Pillow, in sizes and weights drawn at random. No text occurs in two splits, and
papers share no pixel between splits. A sample depends on the seed, the split and its index alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, Literal, get_args

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mmrl.types import AnswerType, DatasetContext, Sample, Target, UserError
from mmrl_datasets.generators.common import (
    RenderedSample,
    SampleRngs,
    check_at_least,
    check_fractions,
    check_one_of,
    choose_phrasing,
    generate_samples,
)
from mmrl_datasets.generators.drawing import SUPERSAMPLING, draw_composition, make_background
from mmrl_datasets.generators.photos import load_textures, parse_split

PAPER_LEVEL: Final = 232
INK_COLOR: Final = (24, 28, 64)
MIN_FONT_PX: Final = 10
MAX_NOISE_STD: Final = 64.0  # standard deviation of full noise, in grey levels of 255
Characters = Literal["words", "digits", "mixed"]
# Left out of `mixed`: what the font draws alike (I, l and 1; O, o and 0), and letters whose cases differ in size alone.
ALPHABETS: Final[Mapping[str, str]] = MappingProxyType(
    {"digits": "0123456789", "mixed": "ABDEFGHMNQRTYabdefghmnqrty23456789"}
)
CONSONANTS: Final = "bdfgklmnprstvz"
VOWELS: Final = "aeiou"


def text(
    place: DatasetContext,
    *,
    split: str,
    size: int | None,
    image_px: int = 48,
    characters: Characters = "words",
    length: int = 4,
    min_length: int = 2,
    rotation: float = 0.0,
    noise: float = 0.0,
    contrast: float = 1.0,
    background: float = 0.15,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Task "ocr": the text as written, case and all; every length from `min_length` to `length` equally often.

    Options:
        split: train, validation or test.
        size: number of samples; null never ends.
        image_px: side of the square picture.
        characters: `words` can be pronounced and mean nothing; `digits`; `mixed` letters of both cases and digits.
        length: most characters.
        min_length: fewest characters, 2 or more: of single ones there are too few for three splits.
        rotation: the line is turned by up to this many degrees either way, at most 45.
        noise: grain of the picture, 0 to 1.
        contrast: darkness of the ink, 0.1 to 1.
        background: how strongly a real texture shows behind, 0 to 1.
        seed: fixes the samples whatever the run's seed, which is taken when None.

    Raises:
        UserError: an option is out of range.
    """
    part = parse_split(split)
    check_one_of(get_args(Characters), characters=characters)
    check_fractions(noise=noise, background=background)
    check_at_least(1, size=size)
    check_at_least(2, min_length=min_length)
    check_at_least(min_length, length=length)
    check_at_least(12 * length, image_px=image_px)
    if not (0.0 <= rotation <= 45.0 and 0.1 <= contrast <= 1.0):
        raise UserError(f"rotation={rotation} must lie between 0 and 45, and contrast={contrast} between 0.1 and 1")
    papers = load_textures(part, image_px)

    def draw(dice: SampleRngs) -> RenderedSample:
        count = int(dice.layout.integers(min_length, length + 1))
        (written,) = draw_composition(part, lambda: [_draw_text(dice.layout, characters, count)])
        canvas = make_background(dice.pixels, papers, image_px=image_px, strength=background, grey=PAPER_LEVEL)
        stencil = _render_to_fit(dice.layout, written, image_px, float(dice.layout.uniform(-rotation, rotation)))
        corner = [int(dice.layout.integers(image_px - side + 1)) for side in stencil.size]
        canvas.paste(INK_COLOR, (corner[0], corner[1]), stencil.point(lambda level: round(level * contrast)))
        return RenderedSample(
            parts=(
                _add_noise(canvas, dice.pixels, noise),
                choose_phrasing(dice.layout, "Read the text.", "What is written here?"),
            ),
            target=Target(answer_type=AnswerType.TEXT, value=written),
            meta={"box": [*corner, corner[0] + stencil.width, corner[1] + stencil.height]},
        )

    return generate_samples(place, "ocr", part, draw, size=size, seed=seed)


def _draw_text(rng: np.random.Generator, characters: str, count: int) -> str:
    if characters != "words":
        return "".join(rng.choice(list(ALPHABETS[characters]), size=count))
    first = int(rng.integers(2))
    alphabets = [(CONSONANTS, VOWELS)[(first + i) % 2] for i in range(count)]
    return "".join(alphabet[int(rng.integers(len(alphabet)))] for alphabet in alphabets)


def _render_to_fit(rng: np.random.Generator, written: str, image_px: int, angle: float) -> Image.Image:
    """The ink of a line of text, cropped, in a random size and weight that fit the picture."""
    weight = float(rng.uniform(0.0, 0.06))  # of the stroke that is added, in font sizes
    for font_px in range(int(rng.integers(12, image_px // 2 + 1)), MIN_FONT_PX - 1, -1):
        ink = _render_text(written, font_px, weight, angle)
        if max(ink.size) <= image_px:
            return ink
    raise UserError(f"{written!r} finds no room in {image_px} pixels at {angle:.0f} degrees; use a larger `image_px`")


def _render_text(written: str, font_px: int, weight: float, angle: float) -> Image.Image:
    font = ImageFont.load_default(size=font_px * SUPERSAMPLING)
    stroke = round(weight * font_px * SUPERSAMPLING)
    left, top, right, bottom = (int(side) for side in font.getbbox(written))
    sheet = Image.new("L", (right - left + 2 * stroke + 4, bottom - top + 2 * stroke + 4))
    ImageDraw.Draw(sheet).text(
        (2 + stroke - left, 2 + stroke - top), written, fill=255, font=font, stroke_width=stroke, stroke_fill=255
    )
    turned = sheet.rotate(angle, Image.Resampling.BICUBIC, expand=True)
    small = turned.resize((-(-turned.width // SUPERSAMPLING), -(-turned.height // SUPERSAMPLING)), Image.Resampling.BOX)
    return small.crop(small.getbbox())


def _add_noise(canvas: Image.Image, rng: np.random.Generator, noise: float) -> Image.Image:
    if not noise:
        return canvas
    levels = np.asarray(canvas) + rng.normal(0.0, MAX_NOISE_STD * noise, (canvas.height, canvas.width, 1))
    return Image.fromarray(levels.clip(0, 255).round().astype(np.uint8))
