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

from mmrl.answer import Grammar
from mmrl.answer.tool_calls import CALL_END, CALL_START
from mmrl.types import Kind, Place, Sample, Target
from mmrl_datasets.generators.common import Dice, Draft, check_fractions, check_least, samples, things_meta
from mmrl_datasets.generators.drawing import Box, Thing, backdrop
from mmrl_datasets.generators.photos import as_split, handwriting, textures
from mmrl_datasets.generators.scenes import INK, PAPER

CORNERS: Final = ("top left", "top right", "bottom left", "bottom right")
LOOSE: Final = 2  # the glass shows so many times a digit's side
GRAMMAR = Grammar()


def corners(
    place: Place,
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
    part = as_split(split)
    check_fractions(background=background, confused=confused)
    check_least(1, size=size, digit_px=digit_px, seen_px=seen_px)
    check_least(4 * LOOSE * digit_px, image_px=image_px)
    scenery = textures(part, image_px)
    inks, values = handwriting(part)
    glasses = _glasses(image_px, LOOSE * digit_px)

    def draw(dice: Dice) -> Draft:
        canvas = backdrop(dice.pixels, scenery, image_px=image_px, strength=background, grey=PAPER)
        picks = [int(pick) for pick in dice.layout.integers(len(inks), size=len(CORNERS))]
        things = []
        for glass, pick in zip(glasses, picks, strict=True):
            left, top = (side + int(dice.layout.integers((LOOSE - 1) * digit_px + 1)) for side in glass[:2])
            box = (left, top, left + digit_px, top + digit_px)
            canvas.paste(INK, box, inks[pick].resize((digit_px, digit_px), Image.Resampling.BICUBIC))
            things.append(Thing(str(values[pick]), box))
        asked = int(dice.layout.integers(len(CORNERS)))
        looked = asked ^ 1 if dice.label.random() < confused else asked  # corners alternate: left, right
        return Draft(
            parts=(canvas, f"Which digit is at the {CORNERS[asked]}?"),
            target=_digit(things[asked].name),
            meta={"things": things_meta(things), "asked": CORNERS[asked], "looked": CORNERS[looked]},
        )

    for sample in samples(place, "corner", part, draw, size=size, seed=seed):
        looked = CORNERS.index(sample.meta["looked"])
        call = {"name": "zoom", "arguments": {"box": [round(side * seen_px / image_px) for side in glasses[looked]]}}
        answer = GRAMMAR.render(_digit(sample.meta["things"][looked]["name"]))
        yield replace(sample, response=f"{CALL_START}{json.dumps(call)}{CALL_END}{answer}")


def _glasses(image_px: int, side: int) -> list[Box]:
    """What is looked at in each corner: a square in the middle of each quarter."""
    starts = [(quarter - side) // 2 for quarter in (image_px // 2, image_px // 2 * 3)]
    return [(x, y, x + side, y + side) for y in starts for x in starts]


def _digit(name: str) -> Target:
    return Target(kind=Kind.NUMBER, value=int(name))
