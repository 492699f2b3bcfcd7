"""Handwritten digits and their sum: hard to give at once, easier after spelling the digits out.

Each sample has a demonstration by a simulated annotator, as a whole response for `target_field: response` of an sft
stage. The annotator gives an answer and, in some samples, rethinks: the rethink text, the digits as thinking, and the
answer that counts. With a given probability the annotator only repeats the first answer instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from mmrl.answer import ResponseFormat
from mmrl.types import AnswerType, DatasetContext, Sample, Target
from mmrl_datasets.generators import common, drawing
from mmrl_datasets.generators.common import Count, Pixels
from mmrl_datasets.generators.photos import load_handwritten_digits, load_textures, parse_split

RESPONSE_FORMAT: Final = ResponseFormat(thinking="optional")  # how demonstrations are written


def sums(
    context: DatasetContext,
    *,
    split: str,
    size: int | None,
    image_px: Pixels = 48,
    length: Count = 2,
    background: float = 0.15,
    rethink_prob: float = 0.0,
    first_wrong_prob: float = 0.5,
    repeat_prob: float = 0.0,
    rethink_text: str = "\n\nWait, let me check.",
    seed: int | None = None,
) -> Iterator[Sample]:
    """Yield samples of task "add": the sum of real handwritten digits on faintly textured paper.

    Options, besides those of all generators (see the package):
        length: number of digits.
        rethink_prob: probability that a demonstration has a second answer.
        first_wrong_prob: probability that the first of two answers is wrong, by 1 to 3.
        repeat_prob: probability that the second of two answers repeats the first, without spelling out the digits.
        rethink_text: text between the two answers.

    Raises:
        UserError: an option is out of range.
    """
    split_name = parse_split(split)
    common.check_fractions(
        background=background, rethink_prob=rethink_prob, first_wrong_prob=first_wrong_prob, repeat_prob=repeat_prob
    )
    common.check_at_least(1, size=size, length=length)
    common.check_at_least(12 * length, image_px=image_px)
    textures = load_textures(split_name, image_px)
    handwriting = load_handwritten_digits(split_name)

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
        return common.RenderedSample(
            parts=(canvas, common.choose_phrasing(rngs.layout, "Add the digits.", "What do the digits add up to?")),
            target=_sum_target(total),
            meta={"things": common.objects_meta(written), **demonstration},
        )

    for sample in common.generate_samples(context, "add", split_name, render, size=size, seed=seed):
        yield replace(sample, response=_write_demonstration(sample, rethink_text))


def _write_demonstration(sample: Sample, rethink_text: str) -> str:
    """Return the response of the annotator: the correct answer, or a first answer, the text and a second answer."""
    first_answer = sample.meta["first"]
    if first_answer is None:
        return RESPONSE_FORMAT.render(sample.target)
    first = RESPONSE_FORMAT.render(_sum_target(first_answer))
    if sample.meta["looks"]:
        thinking = " + ".join(digit["name"] for digit in sample.meta["things"])
        second = RESPONSE_FORMAT.render(sample.target, thinking)
    else:
        second = first
    # The second answer is the one that counts, as in a rollout that was forced to rethink.
    return first + rethink_text + second


def _sum_target(value: int) -> Target:
    return Target(answer_type=AnswerType.NUMBER, value=value)
