"""Printed text to read: made-up words, numbers or mixed characters, optionally rotated, noisy and faint.

The font is Aileron, which comes with Pillow, in random sizes and weights. A composition is a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from math import ceil
from typing import Annotated, Final, Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from pydantic import Field

from mmrl.types import AnswerType, DatasetContext, Sample, Target, UserError
from mmrl_datasets.generators import common, drawing
from mmrl_datasets.generators.common import Count, Fraction, Pixels, Size
from mmrl_datasets.generators.photos import Split, load_textures

MIN_FONT_PX: Final = 10
MAX_NOISE_STD: Final = 64.0  # standard deviation of the noise for `noise: 1`, in grey levels (0 to 255)
Characters = Literal["words", "digits", "mixed"]
# `mixed` leaves out characters that look the same in the font (I, l and 1; O, o and 0), and letters whose two cases
# differ only in size, such as C and c.
ALPHABETS: Final[Mapping[str, str]] = {"digits": "0123456789", "mixed": "ABDEFGHMNQRTYabdefghmnqrty23456789"}
CONSONANTS: Final = "bdfgklmnprstvz"
VOWELS: Final = "aeiou"


def text(
    context: DatasetContext,
    *,
    split: Split,
    size: Size,
    image_px: Pixels = 48,
    characters: Characters = "words",
    length: Count = 4,
    min_length: Annotated[Count, Field(ge=2)] = 2,
    rotation: Annotated[float, Field(ge=0.0, le=45.0)] = 0.0,
    noise: Fraction = 0.0,
    contrast: Annotated[float, Field(ge=0.1, le=1.0)] = 1.0,
    background: Fraction = 0.15,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Yield samples of task "ocr": the text as it is written, including case.

    Each length from `min_length` to `length` is equally likely.

    Options, besides the ones of all generators (see the package):
        characters: `words` are pronounceable but meaningless; `digits`; `mixed` are letters of both cases and digits.
        length: most characters.
        min_length: fewest characters, at least 2, because there are too few single characters for three splits.
        rotation: largest rotation of the line in either direction, in degrees, at most 45.
        noise: strength of the noise, 0 to 1.
        contrast: darkness of the ink, 0.1 to 1.
    """
    common.check_at_least(min_length, length=length)
    common.check_at_least(12 * length, image_px=image_px)
    # Sizes of the line are tried from half the image down, which takes some seconds at this bound.
    common.check_cost(length * image_px**2, 20_000_000, "pixels in a line", length=length, image_px=image_px)
    textures = load_textures(split, image_px)

    def render(rngs: common.SampleRngs) -> common.RenderedSample:
        count = int(rngs.layout.integers(min_length, length + 1))
        written = drawing.draw_composition(split, partial(_draw_text, rngs.layout, characters, count))[0]
        canvas = drawing.make_background(rngs.pixels, textures, image_px, background, drawing.PRINT_PAPER_GREY)
        ink = _render_to_fit(rngs.layout, written, image_px, float(rngs.layout.uniform(-rotation, rotation)))
        left = int(rngs.layout.integers(image_px - ink.width + 1))
        top = int(rngs.layout.integers(image_px - ink.height + 1))
        canvas.paste(drawing.INK_COLOR, (left, top), ink.point(lambda level: round(level * contrast)))
        question = common.choose_phrasing(rngs.layout, "Read the text.", "What is written here?")
        return common.RenderedSample(
            parts=(_add_noise(canvas, rngs.pixels, noise), question),
            target=Target(answer_type=AnswerType.TEXT, value=written),
            meta={"box": [left, top, left + ink.width, top + ink.height]},
        )

    return common.generate_samples(context, "ocr", split, render, size=size, seed=seed)


def _draw_text(rng: np.random.Generator, characters: str, count: int) -> list[str]:
    # A list, because a composition is a list of facts. This one has a single fact, its text.
    if characters != "words":
        return ["".join(rng.choice(list(ALPHABETS[characters]), size=count))]
    # Consonants and vowels take turns; `starts_with_vowel` decides which comes first.
    starts_with_vowel = int(rng.integers(2))
    letters = []
    for position in range(count):
        alphabet = VOWELS if (position + starts_with_vowel) % 2 else CONSONANTS
        letters.append(drawing.choose(rng, alphabet))
    return ["".join(letters)]


def _render_to_fit(rng: np.random.Generator, written: str, image_px: int, angle: float) -> Image.Image:
    """Return the ink of a rotated line of text (mode L), cropped, in a random size and weight that fit the image."""
    # The weight is the width of a stroke added around the letters, in font sizes.
    weight = float(rng.uniform(0.0, 0.06))
    # Largest first, so that the text fills as much of the image as its angle allows.
    for font_px in range(int(rng.integers(12, image_px // 2 + 1)), MIN_FONT_PX - 1, -1):
        ink = _render_text(written, font_px, weight, angle)
        if max(ink.size) <= image_px:
            return ink
    raise UserError(f"{written!r} does not fit into {image_px} pixels at {angle:.0f} degrees; use a larger `image_px`")


def _render_text(written: str, font_px: int, weight: float, angle: float) -> Image.Image:
    # Two pixels of margin on each side take up what rotation and smoothing spread beyond the letters.
    font = ImageFont.load_default(size=font_px * drawing.SUPERSAMPLING)
    stroke = round(weight * font_px * drawing.SUPERSAMPLING)
    left, top, right, bottom = map(int, font.getbbox(written))
    sheet = Image.new("L", (right - left + 2 * stroke + 4, bottom - top + 2 * stroke + 4))
    ImageDraw.Draw(sheet).text(
        (2 + stroke - left, 2 + stroke - top), written, fill=255, font=font, stroke_width=stroke, stroke_fill=255
    )
    rotated = sheet.rotate(angle, Image.Resampling.BICUBIC, expand=True)
    extent = (ceil(rotated.width / drawing.SUPERSAMPLING), ceil(rotated.height / drawing.SUPERSAMPLING))
    small = rotated.resize(extent, Image.Resampling.BOX)
    return small.crop(small.getbbox())


def _add_noise(canvas: Image.Image, rng: np.random.Generator, noise: float) -> Image.Image:
    if not noise:
        return canvas
    # One number a pixel for all three channels: the noise of a camera in the dark, not coloured specks.
    levels = np.asarray(canvas) + rng.normal(0.0, MAX_NOISE_STD * noise, (canvas.height, canvas.width, 1))
    return Image.fromarray(levels.clip(0, 255).round().astype(np.uint8))
