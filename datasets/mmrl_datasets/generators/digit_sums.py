"""Handwritten digits and their sum: hard to give at once, easier after spelling the digits out.

Each sample has a demonstration by a simulated annotator, as a whole response for `target_field: response` of an sft
stage. The annotator gives an answer and, in some samples, rethinks: the rethink text, the digits as thinking, and the
answer that counts. With a given probability the annotator only repeats the first answer instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from mmrl.answer import ResponseFormat
from mmrl.types import AnswerType, DatasetContext, Sample, Target
from mmrl_datasets.generators import common, drawing
from mmrl_datasets.generators.common import Count, Fraction, Pixels, Size
from mmrl_datasets.generators.photos import Split, load_handwritten_digits, load_textures

RESPONSE_FORMAT: Final = ResponseFormat(thinking="optional")  # how demonstrations are written


def sums(
    context: DatasetContext,
    *,
    split: Split,
    size: Size,
    image_px: Pixels = 48,
    length: Count = 2,
    background: Fraction = 0.15,
    rethink_prob: Fraction = 0.0,
    first_wrong_prob: Fraction = 0.5,
    repeat_prob: Fraction = 0.0,
    rethink_text: str = "\n\nWait, let me check.",
    seed: int | None = None,
) -> Iterator[Sample]:
    """Yield samples of task "add": the sum of real handwritten digits on faintly textured paper.

    Options, besides the ones of all generators (see the package):
        length: number of digits.
        rethink_prob: probability that a demonstration has a second answer.
        first_wrong_prob: probability that the first of two answers is wrong, by 1 to 3.
        repeat_prob: probability that the second of two answers repeats the first, without spelling out the digits.
        rethink_text: text between the two answers.
    """
    common.check_at_least(12 * length, image_px=image_px)
    textures = load_textures(split, image_px)
    handwriting = load_handwritten_digits(split)

    def render(rngs: common.SampleRngs) -> common.RenderedSample:
        chosen = list(map(int, rngs.layout.integers(len(handwriting), size=length)))
        boxes = drawing.place_in_line(rngs.layout, length, image_px // length, image_px)
        canvas = drawing.make_background(rngs.pixels, textures, image_px, background, drawing.PAPER_GREY)
        written = drawing.paste_digits(canvas, handwriting, chosen, boxes)
        total = sum(handwriting[index].value for index in chosen)

        # All numbers are drawn whatever the options, so that each option changes its own choice only.
        wrong = abs(total + int(rngs.label.integers(1, 4)) * (1 if rngs.label.random() < 0.5 else -1))
        first_answer = wrong if rngs.label.random() < first_wrong_prob else total
        rethinks = bool(rngs.label.random() < rethink_prob)
        # `first` is null where there is one answer only; `looks`: the digits are spelled out before the second.
        looks = bool(rngs.label.random() >= repeat_prob) and rethinks
        demonstration = {"first": first_answer if rethinks else None, "looks": looks}
        target = _sum_target(total)
        response = RESPONSE_FORMAT.render(target)
        if rethinks:
            first = RESPONSE_FORMAT.render(_sum_target(first_answer))
            thinking = " + ".join(digit.name for digit in written)
            # The second answer is the one that counts, as in a rollout that was forced to rethink.
            second = RESPONSE_FORMAT.render(target, thinking) if looks else first
            response = first + rethink_text + second
        return common.RenderedSample(
            parts=(canvas, common.choose_phrasing(rngs.layout, "Add the digits.", "What do the digits add up to?")),
            target=target,
            response=response,
            meta={"things": common.objects_meta(written), **demonstration},
        )

    return common.generate_samples(context, "add", split, render, size=size, seed=seed)


def _sum_target(value: int) -> Target:
    return Target(answer_type=AnswerType.NUMBER, value=value)
