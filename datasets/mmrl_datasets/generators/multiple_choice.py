"""Multiple choice questions about drawn scenes, with wrong options that a careless look at the scene would suggest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Final, Literal, NamedTuple

import numpy as np
from pydantic import Field

from mmrl.types import AnswerType, DatasetContext, Sample, Target
from mmrl_datasets.choices import LETTERS, format_choices
from mmrl_datasets.generators import common, drawing
from mmrl_datasets.generators.common import Fraction, Pixels, Size
from mmrl_datasets.generators.photos import Split, load_textures

NONE_OF_THESE: Final = "none of these"
Topic = Literal["colour", "place", "count"]
CORNERS: Final[Mapping[str, tuple[int, int]]] = {
    "top left": (0, 0),
    "top right": (1, 0),
    "bottom left": (0, 1),
    "bottom right": (1, 1),
}
"""Quarters of an image: 0 or 1 halves to the right, 0 or 1 halves down."""


class _ChoiceQuestion(NamedTuple):
    text: str
    answer: str
    distractors: list[str]  # wrong answers, the most plausible first


def shapes(
    context: DatasetContext,
    *,
    split: Split,
    size: Size,
    image_px: Annotated[Pixels, Field(ge=24)] = 48,
    max_objects: Annotated[int, Field(ge=1, le=4)] = 4,
    options: Annotated[int, Field(ge=2, le=4)] = 4,
    none_of_these: bool = False,
    topics: Annotated[Sequence[Topic], Field(min_length=1)] = ("colour", "place", "count"),
    background: Fraction = 0.3,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Yield samples of task "mcq": a colour, a place or a number in a scene of shapes; each letter is equally likely.

    Wrong options are colours or places of other shapes in the scene and, if these run out, of no shape in it; or near
    numbers. A composition is the place of each shape.

    Options, besides the ones of all generators (see the package):
        max_objects: most shapes, 1 to 4, each in a different quarter.
        options: number of options, 2 to 4.
        none_of_these: make the last option "none of these", which is correct as often as any other.
        topics: topics of the questions, each equally likely.
    """
    textures = load_textures(split, image_px)

    def render(rngs: common.SampleRngs) -> common.RenderedSample:
        count = 1 + int(rngs.layout.integers(max_objects))
        scene = drawing.draw_composition(split, partial(_draw_scene, rngs.layout, count, image_px))
        canvas = drawing.make_background(rngs.pixels, textures, image_px, background, drawing.SCENE_GREY)
        for shape in scene:
            drawing.draw_shape(canvas, shape)
        topic = drawing.choose(rngs.layout, topics)
        question = _make_question(rngs.layout, topic, scene, image_px)
        letter = drawing.choose(rngs.layout, LETTERS[:options])
        choices = _arrange_options(rngs.layout, question, letter, options, none_of_these=none_of_these)
        return common.RenderedSample(
            parts=(canvas, question.text + format_choices(choices)),
            target=Target(answer_type=AnswerType.CHOICE, value=letter),
            meta={"things": common.objects_meta(scene)},
        )

    return common.generate_samples(context, "mcq", split, render, size=size, seed=seed)


def _draw_scene(rng: np.random.Generator, count: int, image_px: int) -> list[drawing.SceneObject]:
    """Place shapes of different colours in different quarters; no other has the form of the first."""
    half = image_px // 2
    colours = drawing.shuffle(rng, list(drawing.COLOURS))[:count]
    quarters = drawing.shuffle(rng, list(CORNERS.values()))[:count]
    first_form, *other_forms = drawing.shuffle(rng, drawing.SHAPES)
    forms = [first_form, *drawing.choose_with_replacement(rng, other_forms, count - 1)]
    scene = []
    for colour, form, (right, down) in zip(colours, forms, quarters, strict=True):
        side = int(rng.integers(half // 2, half - 1))
        x = right * half + 1 + int(rng.integers(half - 1 - side))
        y = down * half + 1 + int(rng.integers(half - 1 - side))
        scene.append(drawing.SceneObject(f"{colour} {form}", (x, y, x + side, y + side)))
    return scene


def _make_question(
    rng: np.random.Generator, topic: str, scene: Sequence[drawing.SceneObject], image_px: int
) -> _ChoiceQuestion:
    """Return a question about the number of all shapes, or about the colour or place of the first."""
    if topic == "count":
        count = len(scene)
        # Of two numbers equally near, either may come first; the random draw decides.
        near = sorted((n for n in range(1, 7) if n != count), key=lambda n: (abs(n - count), rng.random()))
        return _ChoiceQuestion("How many shapes are there?", str(count), list(map(str, near)))
    colours = [shape.name.split()[0] for shape in scene]
    if topic == "colour":
        form = scene[0].name.split()[1]
        distractors = _order_distractors(rng, drawing.COLOURS, colours)
        return _ChoiceQuestion(f"What colour is the {form}?", colours[0], distractors)
    corner_at = {quarter: name for name, quarter in CORNERS.items()}
    corners = [corner_at[2 * shape.box[0] >= image_px, 2 * shape.box[1] >= image_px] for shape in scene]
    return _ChoiceQuestion(f"Where is the {colours[0]} shape?", corners[0], _order_distractors(rng, CORNERS, corners))


def _order_distractors(rng: np.random.Generator, words: Mapping[str, object], shown: Sequence[str]) -> list[str]:
    """Return all words but the answer, which is `shown[0]`: the others that are shown, then the rest at random."""
    rest = [word for word in words if word not in shown]
    return [*shown[1:], *drawing.shuffle(rng, rest)]


def _arrange_options(
    rng: np.random.Generator, question: _ChoiceQuestion, letter: str, options: int, *, none_of_these: bool
) -> list[str]:
    # `letter` was drawn first, so that each is correct equally often; the options are arranged to fit it.
    position = LETTERS.index(letter)
    num_named = options - none_of_these
    if position == num_named:
        # "none of these" is correct, so the answer is left out.
        return [*drawing.shuffle(rng, question.distractors[:num_named]), NONE_OF_THESE]
    choices = drawing.shuffle(rng, question.distractors[: num_named - 1])
    choices.insert(position, question.answer)
    return [*choices, NONE_OF_THESE] if none_of_these else choices
