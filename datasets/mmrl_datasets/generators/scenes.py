"""Three small tasks on real pixels with exact ground truth: count coloured shapes, find a thing, read a number.

Pictures, compositions and handwritten digits of one split occur in no other. A sample depends on the seed, the split
and its index alone. `label` is what a careless annotator writes; it has a random stream of its own, so that a picture
does not depend on how it is labelled.

Options all three share:
    split: train, validation or test.
    size: number of samples; null never ends.
    image_px: side of the square picture.
    background: how strongly a real texture shows behind, 0 to 1.
    seed: fixes the samples whatever the run's seed, which is taken when None.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal

import numpy as np
from PIL import Image

from mmrl.types import AnswerType, CoordinateSystem, DatasetContext, Sample, Target, UserError
from mmrl_datasets.generators.common import (
    RenderedSample,
    SampleRngs,
    check_at_least,
    check_fractions,
    check_one_of,
    choose_phrasing,
    generate_samples,
    objects_meta,
)
from mmrl_datasets.generators.drawing import (
    COLOURS,
    SHAPES,
    Box,
    SceneObject,
    choose_with_replacement,
    draw_composition,
    draw_shape,
    make_background,
    paste_photo,
    place_boxes,
)
from mmrl_datasets.generators.photos import (
    load_handwritten_digits,
    load_materials,
    load_textures,
    parse_split,
    random_crop,
)

GREY: Final = 128
PAPER_LEVEL: Final = 224
INK_COLOR: Final = (24, 28, 64)
UNCLEAR_LABEL: Final = "unclear"
SHAPE_NAMES: Final = tuple(f"{colour} {shape}" for colour in ("red", "green", "blue", "yellow") for shape in SHAPES)


def counting(
    place: DatasetContext,
    *,
    split: str,
    size: int | None,
    image_px: int = 48,
    max_count: int = 4,
    colours: Sequence[str] = ("red", "green", "blue", "yellow"),
    background: float = 0.3,
    label_miss: float = 0.0,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Task "count": how many shapes have a colour, 0 to `max_count` equally often, among up to two of other colours.

    Options:
        max_count: largest answer.
        colours: two or more names of colours.
        label_miss: chance that the annotator overlooks one of the shapes.

    Raises:
        UserError: an option is out of range.
    """
    part = parse_split(split)
    check_fractions(background=background, label_miss=label_miss)
    check_at_least(1, size=size, max_count=max_count)
    check_at_least(24, image_px=image_px)
    _check_colours(colours)
    scenery = load_textures(part, image_px)

    def draw(dice: SampleRngs) -> RenderedSample:
        colour = colours[int(dice.layout.integers(len(colours)))]
        count = int(dice.layout.integers(max_count + 1))
        others = [other for other in colours if other != colour]
        things = draw_composition(part, lambda: _draw_shapes(dice.layout, [colour] * count, others, image_px))
        canvas = make_background(dice.pixels, scenery, image_px=image_px, strength=background, grey=GREY)
        for thing in things:
            draw_shape(canvas, thing)
        noticed = max(count - int(dice.label.random() < label_miss), 0)
        return RenderedSample(
            parts=(canvas, choose_phrasing(dice.layout, f"How many {colour} shapes?", f"Count the {colour} shapes.")),
            target=Target(answer_type=AnswerType.NUMBER, value=count),
            label=Target(answer_type=AnswerType.NUMBER, value=noticed),
            meta={"things": objects_meta(things)},
        )

    return generate_samples(place, "count", part, draw, size=size, seed=seed)


def grounding(
    place: DatasetContext,
    *,
    split: str,
    size: int | None,
    image_px: int = 48,
    max_things: int = 2,
    grid_px: int = 4,
    things: Literal["photos", "shapes"] = "photos",
    background: float = 0.3,
    label_pad_px: int = 0,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Task "ground": the box of one of 1 to `max_things` differently named things, in original pixels.

    Options:
        max_things: most things in a picture.
        grid_px: corners lie on a grid of this many pixels, which divides `image_px`.
        things: prints of real photographs ("coins"), or drawn shapes ("red disc").
        label_pad_px: the annotator pushes each side outwards by this with chance 3/4, within the picture.

    Raises:
        UserError: an option is out of range.
    """
    part = parse_split(split)
    check_fractions(background=background)
    check_at_least(1, size=size, max_things=max_things, grid_px=grid_px)
    check_at_least(0, label_pad_px=label_pad_px)
    sides = _allowed_sides(image_px, grid_px)
    check_one_of(("photos", "shapes"), things=things)
    photos = load_materials(part, sides[-1]) if things == "photos" else {}
    names = tuple(photos) or SHAPE_NAMES
    if max_things > len(names):
        raise UserError(f"max_things={max_things} exceeds the {len(names)} things there are: {', '.join(names)}")
    scenery = load_textures(part, image_px)

    def draw(dice: SampleRngs) -> RenderedSample:
        count = 1 + int(dice.layout.integers(max_things))
        placed = draw_composition(
            part,
            lambda: _draw_named_objects(dice.layout, names, sides, count=count, image_px=image_px, grid_px=grid_px),
        )
        canvas = make_background(dice.pixels, scenery, image_px=image_px, strength=background, grey=GREY)
        for thing in placed:
            _draw_object(canvas, thing, photos, dice.pixels)
        asked = placed[0]
        return RenderedSample(
            parts=(canvas, choose_phrasing(dice.layout, f"Find the {asked.name}.", f"Locate the {asked.name}.")),
            target=_box_target(asked.box),
            label=_box_target(_pad_box(dice.label, asked.box, label_pad_px, image_px)),
            meta={"things": objects_meta(placed)},
        )

    return generate_samples(place, "ground", part, draw, size=size, seed=seed)


def digits(
    place: DatasetContext,
    *,
    split: str,
    size: int | None,
    image_px: int = 48,
    length: int = 2,
    min_length: int | None = None,
    background: float = 0.15,
    label_giveup: float = 0.0,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Task "read": the number written in real handwritten digits on faintly textured paper.

    Options:
        length: most digits.
        min_length: fewest digits; `length` when None.
        label_giveup: chance that the annotator writes "unclear" instead.

    Raises:
        UserError: an option is out of range.
    """
    part = parse_split(split)
    fewest = length if min_length is None else min_length
    check_fractions(background=background, label_giveup=label_giveup)
    check_at_least(1, size=size, min_length=fewest)
    check_at_least(fewest, length=length)
    check_at_least(12 * length, image_px=image_px)
    scenery = load_textures(part, image_px)
    inks, values = load_handwritten_digits(part)

    def draw(dice: SampleRngs) -> RenderedSample:
        count = int(dice.layout.integers(fewest, length + 1))
        drawn = choose_with_replacement(dice.layout, range(len(inks)), count)
        boxes = place_in_line(dice.layout, count, image_px // length, image_px)
        canvas = make_background(dice.pixels, scenery, image_px=image_px, strength=background, grey=PAPER_LEVEL)
        for digit, box in zip(drawn, boxes, strict=True):
            canvas.paste(
                INK_COLOR, box, inks[digit].resize((box[2] - box[0], box[3] - box[1]), Image.Resampling.BICUBIC)
            )
        number = "".join(str(values[digit]) for digit in drawn)
        written = UNCLEAR_LABEL if dice.label.random() < label_giveup else number
        return RenderedSample(
            parts=(canvas, choose_phrasing(dice.layout, "Read the number.", "Which number is this?")),
            target=Target(answer_type=AnswerType.TEXT, value=number),
            label=Target(answer_type=AnswerType.TEXT, value=written),
            meta={"things": objects_meta([SceneObject(digit, box) for digit, box in zip(number, boxes, strict=True)])},
        )

    return generate_samples(place, "read", part, draw, size=size, seed=seed)


def _draw_shapes(
    rng: np.random.Generator, wanted: Sequence[str], others: Sequence[str], image_px: int
) -> list[SceneObject] | None:
    """Discs and squares in the wanted colours and in up to two others; None where they find no room."""
    hues = [*wanted, *choose_with_replacement(rng, others, int(rng.integers(3)))]
    extents = [(side, side) for side in choose_with_replacement(rng, range(image_px // 7, image_px // 4), len(hues))]
    boxes = place_boxes(rng, extents, image_px=image_px, step=1, gap=2)
    if boxes is None:
        return None
    forms = choose_with_replacement(rng, ("disc", "square"), len(hues))
    return [SceneObject(f"{hue} {form}", box) for hue, form, box in zip(hues, forms, boxes, strict=True)]


def _allowed_sides(image_px: int, grid_px: int) -> list[int]:
    """Multiples of the grid from a quarter to half of the picture."""
    if image_px % grid_px or image_px < 4 * grid_px or image_px < 32:
        raise UserError(f"image_px={image_px} must be at least 32, and 4 or more times grid_px={grid_px} without rest")
    return [side for side in range(grid_px, image_px // 2 + 1, grid_px) if side >= image_px // 4]


def _draw_named_objects(
    rng: np.random.Generator, names: Sequence[str], sides: Sequence[int], *, count: int, image_px: int, grid_px: int
) -> list[SceneObject] | None:
    """Things of different names, rectangular or (drawn ones) square; None where they find no room."""
    chosen = [names[int(i)] for i in rng.permutation(len(names))[:count]]
    widths = choose_with_replacement(rng, sides, count)
    heights = widths if names is SHAPE_NAMES else choose_with_replacement(rng, sides, count)
    boxes = place_boxes(rng, list(zip(widths, heights, strict=True)), image_px=image_px, step=grid_px, gap=0)
    return None if boxes is None else [SceneObject(name, box) for name, box in zip(chosen, boxes, strict=True)]


def _draw_object(
    canvas: Image.Image, thing: SceneObject, photos: dict[str, Image.Image], rng: np.random.Generator
) -> None:
    if not photos:
        draw_shape(canvas, thing)
        return
    x1, y1, x2, y2 = thing.box
    paste_photo(canvas, random_crop(rng, photos[thing.name], x2 - x1, y2 - y1), thing.box)


def place_in_line(rng: np.random.Generator, count: int, slot: int, image_px: int) -> list[Box]:
    """Square boxes from left to right, one per slot, each a little smaller than its slot and at its own height."""
    start = int(rng.integers(image_px - count * slot + 1))
    boxes = []
    for position in range(count):
        side = int(rng.integers(slot * 5 // 6, slot + 1))
        x = start + position * slot + int(rng.integers(slot - side + 1))
        y = int(rng.integers(image_px - side + 1))
        boxes.append((x, y, x + side, y + side))
    return boxes


def _box_target(box: Box) -> Target:
    return Target(answer_type=AnswerType.BOX, value=list(box), coordinate_system=CoordinateSystem.PX_ORIGINAL)


def _pad_box(rng: np.random.Generator, box: Box, pad_px: int, image_px: int) -> Box:
    left, top, right, bottom = (pad_px * int(pushed) for pushed in rng.random(4) < 0.75)
    x1, y1, x2, y2 = box
    return max(x1 - left, 0), max(y1 - top, 0), min(x2 + right, image_px), min(y2 + bottom, image_px)


def _check_colours(colours: Sequence[str]) -> None:
    for colour in colours:
        if colour not in COLOURS:
            raise UserError(f"colour {colour!r} is unknown; there are {', '.join(COLOURS)}")
    if len(set(colours)) < max(2, len(colours)):
        raise UserError(f"colours={list(colours)} must be two or more different ones")
