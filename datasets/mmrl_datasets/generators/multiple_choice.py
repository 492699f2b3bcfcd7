"""Multiple choice questions about drawn scenes, whose wrong options are what a careless look would see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, get_args

import numpy as np

from mmrl.types import AnswerType, DatasetContext, Sample, Target, UserError
from mmrl_datasets.generators.common import (
    RenderedSample,
    SampleRngs,
    check_at_least,
    check_fractions,
    generate_samples,
    objects_meta,
)
from mmrl_datasets.generators.drawing import (
    COLOURS,
    SHAPES,
    SceneObject,
    choose_with_replacement,
    draw_composition,
    draw_shape,
    make_background,
)
from mmrl_datasets.generators.photos import load_textures, parse_split
from mmrl_datasets.readers.answers import LETTERS
from mmrl_datasets.readers.row_to_sample import format_choices

GREY: Final = 128
NONE_OF_THESE: Final = "none of these"
Topic = Literal["colour", "place", "count"]
CORNERS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(  # halves to the right, halves down
    {"top left": (0, 0), "top right": (1, 0), "bottom left": (0, 1), "bottom right": (1, 1)}
)


class _ChoiceQuestion(NamedTuple):
    """A question, its answer, and wrong answers, the most plausible first."""

    text: str
    answer: str
    distractors: list[str]


def shapes(
    place: DatasetContext,
    *,
    split: str,
    size: int | None,
    image_px: int = 48,
    max_things: int = 4,
    options: int = 4,
    none_of_these: bool = False,
    topics: Sequence[Topic] = ("colour", "place", "count"),
    background: float = 0.3,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Task "mcq": a colour, a place or a number in a scene of shapes; every letter is right equally often.

    Wrong options are taken from the same scene as far as they go: other things' colours and places, near numbers.
    Compositions (what stands where) and pixels of the textures belong to one split. A sample depends on the seed, the
    split and its index alone.

    Options:
        split: train, validation or test.
        size: number of samples; null never ends.
        image_px: side of the square picture.
        max_things: most shapes, 1 to 4, each in a quarter of its own.
        options: how many there are to choose from, 2 to 4.
        none_of_these: the last option is "none of these", and right as often as any other.
        topics: what is asked, each equally often.
        background: how strongly a real texture shows behind, 0 to 1.
        seed: fixes the samples whatever the run's seed, which is taken when None.

    Raises:
        UserError: an option is out of range.
    """
    part = parse_split(split)
    check_fractions(background=background)
    check_at_least(1, size=size)
    check_at_least(24, image_px=image_px)
    for name, value, least in (("max_things", max_things, 1), ("options", options, 2)):
        if not least <= value <= 4:
            raise UserError(f"{name}={value} must lie between {least} and 4")
    if not topics or set(topics) - set(get_args(Topic)):
        raise UserError(f"topics={list(topics)} must be some of {', '.join(get_args(Topic))}")
    scenery = load_textures(part, image_px)

    def draw(dice: SampleRngs) -> RenderedSample:
        count = 1 + int(dice.layout.integers(max_things))
        things = draw_composition(part, lambda: _draw_scene(dice.layout, count, image_px))
        canvas = make_background(dice.pixels, scenery, image_px=image_px, strength=background, grey=GREY)
        for thing in things:
            draw_shape(canvas, thing)
        question = _make_question(dice.layout, topics[int(dice.layout.integers(len(topics)))], things, image_px)
        letter = LETTERS[int(dice.layout.integers(options))]
        choices = _arrange_options(dice.layout, question, letter, options, none_of_these=none_of_these)
        return RenderedSample(
            parts=(canvas, question.text + format_choices(choices)),
            target=Target(answer_type=AnswerType.CHOICE, value=letter),
            meta={"things": objects_meta(things)},
        )

    return generate_samples(place, "mcq", part, draw, size=size, seed=seed)


def _draw_scene(rng: np.random.Generator, count: int, image_px: int) -> list[SceneObject]:
    """Shapes of different colours in different quarters; the first is the only one of its form."""
    half = image_px // 2
    colours = [list(COLOURS)[int(i)] for i in rng.permutation(len(COLOURS))[:count]]
    corners = [list(CORNERS.values())[int(i)] for i in rng.permutation(len(CORNERS))[:count]]
    form, *others = (SHAPES[int(i)] for i in rng.permutation(len(SHAPES)))
    forms = [form, *choose_with_replacement(rng, others, count - 1)]
    things = []
    for colour, shape, (right, down) in zip(colours, forms, corners, strict=True):
        side = int(rng.integers(half // 2, half - 1))
        x = right * half + 1 + int(rng.integers(half - 1 - side))
        y = down * half + 1 + int(rng.integers(half - 1 - side))
        things.append(SceneObject(f"{colour} {shape}", (x, y, x + side, y + side)))
    return things


def _make_question(
    rng: np.random.Generator, topic: str, things: Sequence[SceneObject], image_px: int
) -> _ChoiceQuestion:
    """A question about the first thing or, of numbers, about all."""
    if topic == "count":
        count = len(things)
        near = sorted((n for n in range(1, 7) if n != count), key=lambda n: (abs(n - count), rng.random()))
        return _ChoiceQuestion("How many shapes are there?", str(count), [str(number) for number in near])
    colours, corners = [thing.name.split()[0] for thing in things], [_corner_of(thing, image_px) for thing in things]
    if topic == "colour":
        shape = things[0].name.split()[1]
        return _ChoiceQuestion(f"What colour is the {shape}?", colours[0], _order_distractors(rng, COLOURS, colours))
    return _ChoiceQuestion(f"Where is the {colours[0]} shape?", corners[0], _order_distractors(rng, CORNERS, corners))


def _corner_of(thing: SceneObject, image_px: int) -> str:
    x, y, *_ = thing.box
    return next(name for name, place in CORNERS.items() if place == (2 * x >= image_px, 2 * y >= image_px))


def _order_distractors(rng: np.random.Generator, words: Mapping[str, object], seen: Sequence[str]) -> list[str]:
    """Every word but the first one seen: the others seen, then the rest in random order."""
    rest = [word for word in words if word not in seen]
    return [*seen[1:], *(rest[int(i)] for i in rng.permutation(len(rest)))]


def _arrange_options(
    rng: np.random.Generator, question: _ChoiceQuestion, letter: str, options: int, *, none_of_these: bool
) -> list[str]:
    """Options of which the one with this letter is right."""
    place = LETTERS.index(letter)
    named = options - none_of_these
    if place == named:  # the right one is left out
        return [*_shuffle(rng, question.distractors[:named]), NONE_OF_THESE]
    choices = _shuffle(rng, question.distractors[: named - 1])
    choices.insert(place, question.answer)
    return [*choices, NONE_OF_THESE] if none_of_these else choices


def _shuffle(rng: np.random.Generator, words: Sequence[str]) -> list[str]:
    return [words[int(i)] for i in rng.permutation(len(words))]
