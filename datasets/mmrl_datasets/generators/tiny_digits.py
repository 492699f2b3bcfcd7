"""Digits too small to read in the image as the model sees it, and large enough in a crop of it.

Each sample has a demonstration by a simulated annotator, as a whole response for `target_field: response` of an sft
stage whose `rollout_steps` run the zoom tool. The annotator zooms into a corner and answers with the digit in it, but
may confuse left and right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import numpy as np

from mmrl.answer import ResponseFormat
from mmrl.answer.tool_calls import CALL_END, CALL_START
from mmrl.types import AnswerType, DatasetContext, Sample, Target
from mmrl_datasets.generators import common, drawing
from mmrl_datasets.generators.common import Fraction, Pixels, Size
from mmrl_datasets.generators.photos import Split, load_handwritten_digits, load_textures

CORNERS: Final = ("top left", "top right", "bottom left", "bottom right")
ZOOM_SIDE_FACTOR: Final = 2  # side of the zoomed box, in sides of a digit
RESPONSE_FORMAT: Final = ResponseFormat()  # how demonstrations are written


def corner_digits(
    context: DatasetContext,
    *,
    split: Split,
    size: Size,
    image_px: Pixels = 192,
    digit_px: Pixels = 12,
    resized_px: Pixels = 48,
    background: Fraction = 0.15,
    mislabel_prob: Fraction = 0.0,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Yield samples of task "corner": which handwritten digit is in one corner; there is one in each of the four.

    Options, besides the ones of all generators (see the package):
        digit_px: side of a digit.
        resized_px: side of the image as the model sees it, in whose pixels demonstrations give the box to zoom into.
        mislabel_prob: probability that the annotator confuses left and right and answers with the wrong digit.
    """
    common.check_at_least(4 * ZOOM_SIDE_FACTOR * digit_px, image_px=image_px)
    textures = load_textures(split, image_px)
    handwriting = load_handwritten_digits(split)
    zoom_boxes = _zoom_boxes(image_px, ZOOM_SIDE_FACTOR * digit_px)

    def render(rngs: common.SampleRngs) -> common.RenderedSample:
        canvas = drawing.make_background(rngs.pixels, textures, image_px, background, drawing.PAPER_GREY)
        chosen = list(map(int, rngs.layout.integers(len(handwriting), size=len(CORNERS))))
        boxes = [_draw_box_inside(rngs.layout, zoom_box, digit_px) for zoom_box in zoom_boxes]
        written = drawing.paste_digits(canvas, handwriting, chosen, boxes)
        asked = int(rngs.layout.integers(len(CORNERS)))
        # CORNERS alternates left and right, so flipping the lowest bit swaps the two.
        zoomed = asked ^ 1 if rngs.label.random() < mislabel_prob else asked
        # The model answers in pixels of the image as it was resized for it.
        box = [round(side * resized_px / image_px) for side in zoom_boxes[zoomed]]
        call = json.dumps({"name": "zoom", "arguments": {"box": box}})
        answer = RESPONSE_FORMAT.render(_digit_target(written[zoomed].name))
        return common.RenderedSample(
            parts=(canvas, f"Which digit is at the {CORNERS[asked]}?"),
            target=_digit_target(written[asked].name),
            response=f"{CALL_START}{call}{CALL_END}{answer}",
            meta={"things": common.objects_meta(written), "asked": CORNERS[asked], "looked": CORNERS[zoomed]},
        )

    return common.generate_samples(context, "corner", split, render, size=size, seed=seed)


def _zoom_boxes(image_px: int, side_px: int) -> list[drawing.Box]:
    """Return the box to zoom into for each corner: a square in the middle of that quarter of the image."""
    near = (image_px // 2 - side_px) // 2
    far = (image_px // 2 * 3 - side_px) // 2
    return [(x, y, x + side_px, y + side_px) for y in (near, far) for x in (near, far)]


def _draw_box_inside(rng: np.random.Generator, outer: drawing.Box, side_px: int) -> drawing.Box:
    slack_px = outer[2] - outer[0] - side_px
    left = outer[0] + int(rng.integers(slack_px + 1))
    top = outer[1] + int(rng.integers(slack_px + 1))
    return left, top, left + side_px, top + side_px


def _digit_target(name: str) -> Target:
    return Target(answer_type=AnswerType.NUMBER, value=int(name))
