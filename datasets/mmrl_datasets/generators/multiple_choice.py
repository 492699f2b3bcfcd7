"""Multiple choice questions about drawn scenes, whose wrong options are what a careless look would see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, get_args

import numpy as np

from mmrl.types import Kind, Place, Sample, Target, UserError
from mmrl_datasets.generators.common import Dice, Draft, check_fractions, check_least, samples, things_meta
from mmrl_datasets.generators.drawing import COLOURS, SHAPES, Thing, backdrop, compose, paint_shape, picks
from mmrl_datasets.generators.photos import as_split, textures
from mmrl_datasets.readers.answers import LETTERS
from mmrl_datasets.readers.row_to_sample import listed

GREY: Final = 128
NONE: Final = "none of these"
Topic = Literal["colour", "place", "count"]
CORNERS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(  # halves to the right, halves down
    {"top left": (0, 0), "top right": (1, 0), "bottom left": (0, 1), "bottom right": (1, 1)}
)


class _Question(NamedTuple):
    """A question, its answer, and wrong answers, the most plausible first."""

    text: str
    right: str
    wrong: list[str]


def shapes(
    place: Place,
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
    part = as_split(split)
    check_fractions(background=background)
    check_least(1, size=size)
    check_least(24, image_px=image_px)
    for name, value, least in (("max_things", max_things, 1), ("options", options, 2)):
        if not least <= value <= 4:
            raise UserError(f"{name}={value} must lie between {least} and 4")
    if not topics or set(topics) - set(get_args(Topic)):
        raise UserError(f"topics={list(topics)} must be some of {', '.join(get_args(Topic))}")
    scenery = textures(part, image_px)

    def draw(dice: Dice) -> Draft:
        count = 1 + int(dice.layout.integers(max_things))
        things = compose(part, lambda: _scene(dice.layout, count, image_px))
        canvas = backdrop(dice.pixels, scenery, image_px=image_px, strength=background, grey=GREY)
        for thing in things:
            paint_shape(canvas, thing)
        question = _asked(dice.layout, topics[int(dice.layout.integers(len(topics)))], things, image_px)
        letter = LETTERS[int(dice.layout.integers(options))]
        choices = _choices(dice.layout, question, letter, options, none_of_these=none_of_these)
        return Draft(
            parts=(canvas, question.text + listed(choices)),
            target=Target(kind=Kind.CHOICE, value=letter),
            meta={"things": things_meta(things)},
        )

    return samples(place, "mcq", part, draw, size=size, seed=seed)


def _scene(rng: np.random.Generator, count: int, image_px: int) -> list[Thing]:
    """Shapes of different colours in different quarters; the first is the only one of its form."""
    half = image_px // 2
    colours = [list(COLOURS)[int(i)] for i in rng.permutation(len(COLOURS))[:count]]
    corners = [list(CORNERS.values())[int(i)] for i in rng.permutation(len(CORNERS))[:count]]
    form, *others = (SHAPES[int(i)] for i in rng.permutation(len(SHAPES)))
    forms = [form, *picks(rng, others, count - 1)]
    things = []
    for colour, shape, (right, down) in zip(colours, forms, corners, strict=True):
        side = int(rng.integers(half // 2, half - 1))
        x = right * half + 1 + int(rng.integers(half - 1 - side))
        y = down * half + 1 + int(rng.integers(half - 1 - side))
        things.append(Thing(f"{colour} {shape}", (x, y, x + side, y + side)))
    return things


def _asked(rng: np.random.Generator, topic: str, things: Sequence[Thing], image_px: int) -> _Question:
    """A question about the first thing or, of numbers, about all."""
    if topic == "count":
        count = len(things)
        near = sorted((n for n in range(1, 7) if n != count), key=lambda n: (abs(n - count), rng.random()))
        return _Question("How many shapes are there?", str(count), [str(number) for number in near])
    colours, corners = [thing.name.split()[0] for thing in things], [_corner(thing, image_px) for thing in things]
    if topic == "colour":
        shape = things[0].name.split()[1]
        return _Question(f"What colour is the {shape}?", colours[0], _plausible(rng, COLOURS, colours))
    return _Question(f"Where is the {colours[0]} shape?", corners[0], _plausible(rng, CORNERS, corners))


def _corner(thing: Thing, image_px: int) -> str:
    x, y, *_ = thing.box
    return next(name for name, place in CORNERS.items() if place == (2 * x >= image_px, 2 * y >= image_px))


def _plausible(rng: np.random.Generator, words: Mapping[str, object], seen: Sequence[str]) -> list[str]:
    """Every word but the first one seen: the others seen, then the rest in random order."""
    rest = [word for word in words if word not in seen]
    return [*seen[1:], *(rest[int(i)] for i in rng.permutation(len(rest)))]


def _choices(
    rng: np.random.Generator, question: _Question, letter: str, options: int, *, none_of_these: bool
) -> list[str]:
    """Options of which the one with this letter is right."""
    place = LETTERS.index(letter)
    named = options - none_of_these
    if place == named:  # the right one is left out
        return [*_mixed(rng, question.wrong[:named]), NONE]
    choices = _mixed(rng, question.wrong[: named - 1])
    choices.insert(place, question.right)
    return [*choices, NONE] if none_of_these else choices


def _mixed(rng: np.random.Generator, words: Sequence[str]) -> list[str]:
    return [words[int(i)] for i in rng.permutation(len(words))]
