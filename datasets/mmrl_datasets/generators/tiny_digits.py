"""Digits too small to be read in the picture as it is shown, and large enough once a part of it is looked at alone.

Demonstrations are those of an annotator who looks through a glass and reads what it shows, and may confuse left and
right. They are whole responses, for `imitate: response` and an sft stage whose `program` answers calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from PIL import Image

from mmrl.answer import ResponseFormat
from mmrl.answer.tool_calls import CALL_END, CALL_START
from mmrl.types import AnswerType, DatasetContext, Sample, Target
from mmrl_datasets.generators.common import (
    RenderedSample,
    SampleRngs,
    check_at_least,
    check_fractions,
    generate_samples,
    objects_meta,
)
from mmrl_datasets.generators.drawing import Box, SceneObject, make_background
from mmrl_datasets.generators.photos import load_handwritten_digits, load_textures, parse_split
from mmrl_datasets.generators.scenes import INK_COLOR, PAPER_LEVEL

CORNERS: Final = ("top left", "top right", "bottom left", "bottom right")
ZOOM_SIDE_FACTOR: Final = 2  # the glass shows so many times a digit's side
GRAMMAR = ResponseFormat()


def corners(
    place: DatasetContext,
    *,
    split: str,
    size: int | None,
    image_px: int = 192,
    digit_px: int = 12,
    seen_px: int = 48,
    background: float = 0.15,
    confused: float = 0.0,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Task "corner": which real handwritten digit stands in a corner of faintly textured paper; there is one in each.

    Options:
        split: train, validation or test; no handwriting of one occurs in another.
        size: number of samples; null never ends.
        image_px: side of the square picture.
        digit_px: side of a digit.
        seen_px: side of the picture as the model sees it, in which demonstrations measure what they zoom into.
        background: how strongly a real texture shows behind, 0 to 1.
        confused: chance that the annotator takes left for right, and says what stands there.
        seed: fixes the samples whatever the run's seed, which is taken when None.

    Raises:
        UserError: an option is out of range.
    """
    part = parse_split(split)
    check_fractions(background=background, confused=confused)
    check_at_least(1, size=size, digit_px=digit_px, seen_px=seen_px)
    check_at_least(4 * ZOOM_SIDE_FACTOR * digit_px, image_px=image_px)
    scenery = load_textures(part, image_px)
    inks, values = load_handwritten_digits(part)
    glasses = _zoom_boxes(image_px, ZOOM_SIDE_FACTOR * digit_px)

    def draw(dice: SampleRngs) -> RenderedSample:
        canvas = make_background(dice.pixels, scenery, image_px=image_px, strength=background, grey=PAPER_LEVEL)
        picks = [int(pick) for pick in dice.layout.integers(len(inks), size=len(CORNERS))]
        things = []
        for glass, pick in zip(glasses, picks, strict=True):
            left, top = (side + int(dice.layout.integers((ZOOM_SIDE_FACTOR - 1) * digit_px + 1)) for side in glass[:2])
            box = (left, top, left + digit_px, top + digit_px)
            canvas.paste(INK_COLOR, box, inks[pick].resize((digit_px, digit_px), Image.Resampling.BICUBIC))
            things.append(SceneObject(str(values[pick]), box))
        asked = int(dice.layout.integers(len(CORNERS)))
        looked = asked ^ 1 if dice.label.random() < confused else asked  # corners alternate: left, right
        return RenderedSample(
            parts=(canvas, f"Which digit is at the {CORNERS[asked]}?"),
            target=_digit_target(things[asked].name),
            meta={"things": objects_meta(things), "asked": CORNERS[asked], "looked": CORNERS[looked]},
        )

    for sample in generate_samples(place, "corner", part, draw, size=size, seed=seed):
        looked = CORNERS.index(sample.meta["looked"])
        call = {"name": "zoom", "arguments": {"box": [round(side * seen_px / image_px) for side in glasses[looked]]}}
        answer = GRAMMAR.render(_digit_target(sample.meta["things"][looked]["name"]))
        yield replace(sample, response=f"{CALL_START}{json.dumps(call)}{CALL_END}{answer}")


def _zoom_boxes(image_px: int, side: int) -> list[Box]:
    """What is looked at in each corner: a square in the middle of each quarter."""
    starts = [(quarter - side) // 2 for quarter in (image_px // 2, image_px // 2 * 3)]
    return [(x, y, x + side, y + side) for y in starts for x in starts]


def _digit_target(name: str) -> Target:
    return Target(answer_type=AnswerType.NUMBER, value=int(name))
