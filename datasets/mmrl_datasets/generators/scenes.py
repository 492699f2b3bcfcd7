"""Three small tasks on real pixels with exact answers: count coloured shapes, find an object, read a number.

Backgrounds, compositions and handwritten digits of one split occur in no other. A sample depends on the seed, the split
and its index alone. Its `label` is the answer of a simulated careless annotator, drawn from a random generator of its
own, so that the image does not depend on the label.

Options that all three share:
    split: train, validation or test.
    size: number of samples; null never ends.
    image_px: side of the square image.
    background: strength of the real texture behind the objects, 0 to 1.
    seed: fixes the samples; null takes the seed of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
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
    PAPER_GREY,
    SCENE_GREY,
    SHAPES,
    Box,
    SceneObject,
    choose_with_replacement,
    draw_composition,
    draw_shape,
    make_background,
    paste_digits,
    paste_photo,
    place_boxes,
    place_in_line,
)
from mmrl_datasets.generators.photos import (
    load_handwritten_digits,
    load_materials,
    load_textures,
    parse_split,
    random_crop,
)

UNCLEAR_LABEL: Final = "unclear"
SHAPE_NAMES: Final = tuple(f"{colour} {shape}" for colour in ("red", "green", "blue", "yellow") for shape in SHAPES)


def counting(
    context: DatasetContext,
    *,
    split: str,
    size: int | None,
    image_px: int = 48,
    max_count: int = 4,
    colours: Sequence[str] = ("red", "green", "blue", "yellow"),
    background: float = 0.3,
    label_miss_prob: float = 0.0,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Yield samples of task "count": how many shapes have a given colour.

    Each answer from 0 to `max_count` is equally likely. Up to two shapes of other colours stand among them.

    Options:
        max_count: largest answer.
        colours: names of two or more colours.
        label_miss_prob: probability that the annotator overlooks one of the shapes.

    Raises:
        UserError: an option is out of range.
    """
    split_name = parse_split(split)
    check_fractions(background=background, label_miss_prob=label_miss_prob)
    check_at_least(1, size=size, max_count=max_count)
    check_at_least(24, image_px=image_px)
    _check_colours(colours)
    textures = load_textures(split_name, image_px)

    def render(rngs: SampleRngs) -> RenderedSample:
        colour = colours[int(rngs.layout.integers(len(colours)))]
        count = int(rngs.layout.integers(max_count + 1))
        others = []
        for other in colours:
            if other != colour:
                others.append(other)
        draw = partial(_draw_coloured_shapes, rngs.layout, [colour] * count, others, image_px)
        shapes = draw_composition(split_name, draw)
        canvas = make_background(rngs.pixels, textures, image_px=image_px, strength=background, grey=SCENE_GREY)
        for shape in shapes:
            draw_shape(canvas, shape)
        noticed = max(count - int(rngs.label.random() < label_miss_prob), 0)
        return RenderedSample(
            parts=(canvas, choose_phrasing(rngs.layout, f"How many {colour} shapes?", f"Count the {colour} shapes.")),
            target=Target(answer_type=AnswerType.NUMBER, value=count),
            label=Target(answer_type=AnswerType.NUMBER, value=noticed),
            meta={"things": objects_meta(shapes)},
        )

    return generate_samples(context, "count", split_name, render, size=size, seed=seed)


def grounding(
    context: DatasetContext,
    *,
    split: str,
    size: int | None,
    image_px: int = 48,
    max_objects: int = 2,
    grid_px: int = 4,
    objects: Literal["photos", "shapes"] = "photos",
    background: float = 0.3,
    label_pad_px: int = 0,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Yield samples of task "ground": the box, in original pixels, of one of 1 to `max_objects` named objects.

    Options:
        max_objects: most objects in an image; their names differ.
        grid_px: corners lie on a grid of this many pixels, which divides `image_px`.
        objects: prints of real photographs ("coins"), or drawn shapes ("red disc").
        label_pad_px: the annotator moves each side of the box outwards by this, with probability 3/4 for each side.

    Raises:
        UserError: an option is out of range.
    """
    split_name = parse_split(split)
    check_fractions(background=background)
    check_at_least(1, size=size, max_objects=max_objects, grid_px=grid_px)
    check_at_least(0, label_pad_px=label_pad_px)
    sides = _allowed_sides(image_px, grid_px)
    check_one_of(("photos", "shapes"), objects=objects)
    photos = load_materials(split_name, sides[-1]) if objects == "photos" else {}
    names = tuple(photos) or SHAPE_NAMES
    if max_objects > len(names):
        raise UserError(f"max_objects={max_objects} exceeds the {len(names)} objects there are: {', '.join(names)}")
    textures = load_textures(split_name, image_px)

    def render(rngs: SampleRngs) -> RenderedSample:
        count = 1 + int(rngs.layout.integers(max_objects))
        draw = partial(_draw_named_objects, rngs.layout, names, sides, count=count, image_px=image_px, grid_px=grid_px)
        placed = draw_composition(split_name, draw)
        canvas = make_background(rngs.pixels, textures, image_px=image_px, strength=background, grey=SCENE_GREY)
        for scene_object in placed:
            _draw_object(canvas, scene_object, photos, rngs.pixels)
        wanted = placed[0]
        return RenderedSample(
            parts=(canvas, choose_phrasing(rngs.layout, f"Find the {wanted.name}.", f"Locate the {wanted.name}.")),
            target=_box_target(wanted.box),
            label=_box_target(_pad_box(rngs.label, wanted.box, label_pad_px, image_px)),
            meta={"things": objects_meta(placed)},
        )

    return generate_samples(context, "ground", split_name, render, size=size, seed=seed)


def digits(
    context: DatasetContext,
    *,
    split: str,
    size: int | None,
    image_px: int = 48,
    length: int = 2,
    min_length: int | None = None,
    background: float = 0.15,
    label_unclear_prob: float = 0.0,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Yield samples of task "read": the number written in real handwritten digits on faintly textured paper.

    Options:
        length: most digits.
        min_length: fewest digits; null takes `length`.
        label_unclear_prob: probability that the annotator writes "unclear" in place of the number.

    Raises:
        UserError: an option is out of range.
    """
    split_name = parse_split(split)
    fewest = length if min_length is None else min_length
    check_fractions(background=background, label_unclear_prob=label_unclear_prob)
    check_at_least(1, size=size, min_length=fewest)
    check_at_least(fewest, length=length)
    check_at_least(12 * length, image_px=image_px)
    textures = load_textures(split_name, image_px)
    handwriting = load_handwritten_digits(split_name)

    def render(rngs: SampleRngs) -> RenderedSample:
        count = int(rngs.layout.integers(fewest, length + 1))
        chosen = choose_with_replacement(rngs.layout, range(len(handwriting)), count)
        boxes = place_in_line(rngs.layout, count, image_px // length, image_px)
        canvas = make_background(rngs.pixels, textures, image_px=image_px, strength=background, grey=PAPER_GREY)
        written = paste_digits(canvas, handwriting, chosen, boxes)
        number = "".join(digit.name for digit in written)
        label = UNCLEAR_LABEL if rngs.label.random() < label_unclear_prob else number
        return RenderedSample(
            parts=(canvas, choose_phrasing(rngs.layout, "Read the number.", "Which number is this?")),
            target=Target(answer_type=AnswerType.TEXT, value=number),
            label=Target(answer_type=AnswerType.TEXT, value=label),
            meta={"things": objects_meta(written)},
        )

    return generate_samples(context, "read", split_name, render, size=size, seed=seed)


def _draw_coloured_shapes(
    rng: np.random.Generator, wanted: Sequence[str], others: Sequence[str], image_px: int
) -> list[SceneObject] | None:
    """Place discs and squares of the wanted colours and of up to two others; None if they find no room."""
    colours = [*wanted, *choose_with_replacement(rng, others, int(rng.integers(3)))]
    sides = choose_with_replacement(rng, range(image_px // 7, image_px // 4), len(colours))
    boxes = place_boxes(rng, [(side, side) for side in sides], image_px=image_px, step=1, gap=2)
    if boxes is None:
        return None
    forms = choose_with_replacement(rng, ("disc", "square"), len(colours))
    return [SceneObject(f"{colour} {form}", box) for colour, form, box in zip(colours, forms, boxes, strict=True)]


def _allowed_sides(image_px: int, grid_px: int) -> list[int]:
    """Return the sides that an object may have: multiples of the grid from a quarter to half of the image."""
    if image_px % grid_px or image_px < 4 * grid_px or image_px < 32:
        raise UserError(f"image_px={image_px} must be at least 32, and 4 or more times grid_px={grid_px} without rest")
    return [side for side in range(grid_px, image_px // 2 + 1, grid_px) if side >= image_px // 4]


def _draw_named_objects(
    rng: np.random.Generator, names: Sequence[str], sides: Sequence[int], *, count: int, image_px: int, grid_px: int
) -> list[SceneObject] | None:
    """Place objects of different names, photos as rectangles and shapes as squares; None if they find no room."""
    chosen = []
    for index in rng.permutation(len(names))[:count]:
        chosen.append(names[int(index)])
    widths = choose_with_replacement(rng, sides, count)
    heights = widths if names is SHAPE_NAMES else choose_with_replacement(rng, sides, count)
    boxes = place_boxes(rng, list(zip(widths, heights, strict=True)), image_px=image_px, step=grid_px, gap=0)
    if boxes is None:
        return None
    return [SceneObject(name, box) for name, box in zip(chosen, boxes, strict=True)]


def _draw_object(
    canvas: Image.Image, scene_object: SceneObject, photos: dict[str, Image.Image], rng: np.random.Generator
) -> None:
    if not photos:
        draw_shape(canvas, scene_object)
        return
    x1, y1, x2, y2 = scene_object.box
    paste_photo(canvas, random_crop(rng, photos[scene_object.name], x2 - x1, y2 - y1), scene_object.box)


def _box_target(box: Box) -> Target:
    return Target(answer_type=AnswerType.BOX, value=list(box), coordinate_system=CoordinateSystem.PX_ORIGINAL)


def _pad_box(rng: np.random.Generator, box: Box, pad_px: int, image_px: int) -> Box:
    """Move each side outwards by `pad_px` with probability 3/4, at most to the edge of the image."""
    left, top, right, bottom = (pad_px * int(moves) for moves in rng.random(4) < 0.75)
    x1, y1, x2, y2 = box
    return max(x1 - left, 0), max(y1 - top, 0), min(x2 + right, image_px), min(y2 + bottom, image_px)


def _check_colours(colours: Sequence[str]) -> None:
    for colour in colours:
        if colour not in COLOURS:
            raise UserError(f"colour {colour!r} is unknown; there are {', '.join(COLOURS)}")
    if len(set(colours)) < max(2, len(colours)):
        raise UserError(f"colours={list(colours)} must be two or more different ones")
