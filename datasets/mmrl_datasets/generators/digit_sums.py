"""Handwritten digits and their sum: hard to say at a glance, easier with the digits spelled out first.

Demonstrations are those of an annotator who sometimes looks twice: an answer, then the words of a second look, the
digits as thinking, and the answer that counts; or, out of laziness, the first answer once more. They are whole
responses, for `imitate: response`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from PIL import Image

from mmrl.answer import ResponseFormat
from mmrl.types import AnswerType, DatasetContext, Sample, Target
from mmrl_datasets.generators.common import (
    RenderedSample,
    SampleRngs,
    check_at_least,
    check_fractions,
    choose_phrasing,
    generate_samples,
    objects_meta,
)
from mmrl_datasets.generators.drawing import SceneObject, make_background
from mmrl_datasets.generators.photos import load_handwritten_digits, load_textures, parse_split
from mmrl_datasets.generators.scenes import INK_COLOR, PAPER_LEVEL, place_in_line

GRAMMAR = ResponseFormat(thinking="optional")


def adding(
    place: DatasetContext,
    *,
    split: str,
    size: int | None,
    image_px: int = 48,
    length: int = 2,
    background: float = 0.15,
    second_look: float = 0.0,
    slip: float = 0.5,
    lazy: float = 0.0,
    words: str = "\n\nWait, let me check.",
    seed: int | None = None,
) -> Iterator[Sample]:
    """Task "add": the sum of real handwritten digits on faintly textured paper.

    Options:
        split: train, validation or test; no handwriting of one occurs in another.
        size: number of samples; null never ends.
        image_px: side of the square picture.
        length: number of digits.
        background: how strongly a real texture shows behind, 0 to 1.
        second_look: chance that the annotator looks twice.
        slip: chance that the first of two answers is wrong, by 1 to 3.
        lazy: chance that the second of two answers is the first again, without a look.
        words: what stands between the two.
        seed: fixes the samples whatever the run's seed, which is taken when None.

    Raises:
        UserError: an option is out of range.
    """
    part = parse_split(split)
    check_fractions(background=background, second_look=second_look, slip=slip, lazy=lazy)
    check_at_least(1, size=size, length=length)
    check_at_least(12 * length, image_px=image_px)
    scenery = load_textures(part, image_px)
    inks, values = load_handwritten_digits(part)

    def draw(dice: SampleRngs) -> RenderedSample:
        picks = [int(pick) for pick in dice.layout.integers(len(inks), size=length)]
        boxes = place_in_line(dice.layout, length, image_px // length, image_px)
        canvas = make_background(dice.pixels, scenery, image_px=image_px, strength=background, grey=PAPER_LEVEL)
        for pick, box in zip(picks, boxes, strict=True):
            canvas.paste(
                INK_COLOR, box, inks[pick].resize((box[2] - box[0], box[3] - box[1]), Image.Resampling.BICUBIC)
            )
        numbers = [int(values[pick]) for pick in picks]
        total = sum(numbers)
        first = _draw_first_answer(dice, total, slip)
        twice, looks = bool(dice.label.random() < second_look), bool(dice.label.random() >= lazy)
        return RenderedSample(
            parts=(canvas, choose_phrasing(dice.layout, "Add the digits.", "What do the digits add up to?")),
            target=_sum_target(total),
            meta={
                "things": objects_meta([SceneObject(str(n), box) for n, box in zip(numbers, boxes, strict=True)]),
                "first": first if twice else None,
                "looks": twice and looks,
            },
        )

    for sample in generate_samples(place, "add", part, draw, size=size, seed=seed):
        yield replace(sample, response=_write_demonstration(sample, words))


def _draw_first_answer(dice: SampleRngs, total: int, slip: float) -> int:
    """The sum, or by chance `slip` one that is wrong by 1 to 3."""
    wrong = abs(total + int(dice.label.integers(1, 4)) * (1 if dice.label.random() < 0.5 else -1))
    return wrong if dice.label.random() < slip else total


def _write_demonstration(sample: Sample, words: str) -> str:
    """The answer at once, or behind a first one."""
    first = sample.meta["first"]
    if first is None:
        return GRAMMAR.render(sample.target)
    thought = " + ".join(thing["name"] for thing in sample.meta["things"])
    second = GRAMMAR.render(sample.target, thought) if sample.meta["looks"] else GRAMMAR.render(_sum_target(first))
    return GRAMMAR.render(_sum_target(first)) + words + second


def _sum_target(value: int) -> Target:
    return Target(answer_type=AnswerType.NUMBER, value=value)
