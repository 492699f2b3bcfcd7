"""Three small tasks on real pixels with exact answers: count coloured shapes, find an object, read a number.

The `label` of a sample is the answer of a simulated careless annotator, drawn from a separate random generator, so
the image does not depend on the label.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Final, Literal

import numpy as np
from PIL import Image
from pydantic import Field

from mmrl.types import AnswerType, CoordinateSystem, DatasetContext, Sample, Target, UserError
from mmrl_datasets.generators import common, drawing, photos
from mmrl_datasets.generators.common import Count, Fraction, Pixels, Size

UNCLEAR_LABEL: Final = "unclear"
SHAPE_NAMES: Final = tuple(f"{colour} {shape}" for colour in drawing.SHAPE_COLOURS for shape in drawing.SHAPES)


def counting(
    context: DatasetContext,
    *,
    split: photos.Split,
    size: Size,
    image_px: Annotated[Pixels, Field(ge=24)] = 48,
    max_count: Count = 4,
    colours: Sequence[str] = drawing.SHAPE_COLOURS,
    background: Fraction = 0.3,
    label_miss_prob: Fraction = 0.0,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Yield samples of task "count": how many shapes have a given colour.

    Each answer from 0 to `max_count` is equally likely. Up to two shapes of other colours are among them.

    Options:
        max_count: largest answer.
        colours: names of two or more colours.
        label_miss_prob: probability that the annotator overlooks one of the shapes.
    """
    for colour in colours:
        if colour not in drawing.COLOURS:
            raise UserError(f"colour {colour!r} is unknown; there are {', '.join(drawing.COLOURS)}")
    if len(set(colours)) < max(2, len(colours)):
        raise UserError(f"colours={list(colours)} must be two or more different ones")
    textures = photos.load_textures(split, image_px)

    def render(rngs: common.SampleRngs) -> common.RenderedSample:
        colour = drawing.choose(rngs.layout, colours)
        # The answer is drawn before the scene, so that every answer is equally likely.
        count = int(rngs.layout.integers(max_count + 1))
        others = [other for other in colours if other != colour]
        draw = partial(_draw_coloured_shapes, rngs.layout, [colour] * count, others, image_px)
        shapes = drawing.draw_composition(split, draw)
        canvas = drawing.make_background(rngs.pixels, textures, image_px, background, drawing.SCENE_GREY)
        for shape in shapes:
            drawing.draw_shape(canvas, shape)
        noticed = max(count - int(rngs.label.random() < label_miss_prob), 0)
        question = common.choose_phrasing(rngs.layout, f"How many {colour} shapes?", f"Count the {colour} shapes.")
        return common.RenderedSample(
            parts=(canvas, question),
            target=Target(answer_type=AnswerType.NUMBER, value=count),
            label=Target(answer_type=AnswerType.NUMBER, value=noticed),
            meta={"things": common.objects_meta(shapes)},
        )

    return common.generate_samples(context, "count", split, render, size=size, seed=seed)


def grounding(
    context: DatasetContext,
    *,
    split: photos.Split,
    size: Size,
    image_px: Pixels = 48,
    max_objects: Count = 2,
    grid_px: Pixels = 4,
    objects: Literal["photos", "shapes"] = "photos",
    background: Fraction = 0.3,
    label_pad_px: Annotated[int, Field(ge=0, le=10_000)] = 0,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Yield samples of task "ground": the box, in original pixels, of one of 1 to `max_objects` named objects.

    Options:
        max_objects: most objects in an image; their names differ.
        grid_px: corners of boxes lie at multiples of this many pixels, which divides `image_px`.
        objects: prints of real photographs ("coins"), or drawn shapes ("red disc").
        label_pad_px: the annotator moves each side of the box outwards by this, with probability 3/4 for each side.
    """
    sides = _allowed_sides(image_px, grid_px)
    materials = photos.load_materials(split, sides[-1]) if objects == "photos" else {}
    names = tuple(materials) or SHAPE_NAMES
    if max_objects > len(names):
        raise UserError(f"max_objects={max_objects} exceeds the {len(names)} objects there are: {', '.join(names)}")
    textures = photos.load_textures(split, image_px)

    def render(rngs: common.SampleRngs) -> common.RenderedSample:
        count = 1 + int(rngs.layout.integers(max_objects))
        draw = partial(_draw_named_objects, rngs.layout, names, sides, count=count, image_px=image_px, grid_px=grid_px)
        placed = drawing.draw_composition(split, draw)
        canvas = drawing.make_background(rngs.pixels, textures, image_px, background, drawing.SCENE_GREY)
        for scene_object in placed:
            if materials:
                _paste_photo(canvas, materials[scene_object.name], scene_object.box, rngs.pixels)
            else:
                drawing.draw_shape(canvas, scene_object)
        name, box = placed[0]
        return common.RenderedSample(
            parts=(canvas, common.choose_phrasing(rngs.layout, f"Find the {name}.", f"Locate the {name}.")),
            target=_box_target(box),
            label=_box_target(_pad_box(rngs.label, box, label_pad_px, image_px)),
            meta={"things": common.objects_meta(placed)},
        )

    return common.generate_samples(context, "ground", split, render, size=size, seed=seed)


def digits(
    context: DatasetContext,
    *,
    split: photos.Split,
    size: Size,
    image_px: Pixels = 48,
    length: Count = 2,
    min_length: Count | None = None,
    background: Fraction = 0.15,
    label_unclear_prob: Fraction = 0.0,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Yield samples of task "read": the number written in real handwritten digits on faintly textured paper.

    Options:
        length: most digits.
        min_length: fewest digits; null takes `length`.
        label_unclear_prob: probability that the annotator writes "unclear" in place of the number.
    """
    fewest = length if min_length is None else min_length
    common.check_at_least(fewest, length=length)
    common.check_at_least(12 * length, image_px=image_px)
    textures = photos.load_textures(split, image_px)
    handwriting = photos.load_handwritten_digits(split)

    def render(rngs: common.SampleRngs) -> common.RenderedSample:
        count = int(rngs.layout.integers(fewest, length + 1))
        chosen = drawing.choose_with_replacement(rngs.layout, range(len(handwriting)), count)
        boxes = drawing.place_in_line(rngs.layout, count, image_px // length, image_px)
        canvas = drawing.make_background(rngs.pixels, textures, image_px, background, drawing.PAPER_GREY)
        written = drawing.paste_digits(canvas, handwriting, chosen, boxes)
        number = "".join(digit.name for digit in written)
        label = UNCLEAR_LABEL if rngs.label.random() < label_unclear_prob else number
        return common.RenderedSample(
            parts=(canvas, common.choose_phrasing(rngs.layout, "Read the number.", "Which number is this?")),
            target=Target(answer_type=AnswerType.TEXT, value=number),
            label=Target(answer_type=AnswerType.TEXT, value=label),
            meta={"things": common.objects_meta(written)},
        )

    return common.generate_samples(context, "read", split, render, size=size, seed=seed)


def _draw_coloured_shapes(
    rng: np.random.Generator, wanted: Sequence[str], others: Sequence[str], image_px: int
) -> list[drawing.SceneObject] | None:
    """Place discs and squares of the wanted colours and of up to two others; None if they do not fit."""
    colours = [*wanted, *drawing.choose_with_replacement(rng, others, int(rng.integers(3)))]
    sides = drawing.choose_with_replacement(rng, range(image_px // 7, image_px // 4), len(colours))
    boxes = drawing.place_boxes(rng, [(side, side) for side in sides], image_px=image_px, step=1, gap=2)
    if boxes is None:
        return None
    forms = drawing.choose_with_replacement(rng, ("disc", "square"), len(colours))
    names = [f"{colour} {form}" for colour, form in zip(colours, forms, strict=True)]
    return list(map(drawing.SceneObject, names, boxes))


def _allowed_sides(image_px: int, grid_px: int) -> list[int]:
    # An object is at least a quarter of the image wide, or it would be hard to see, and at most half.
    if image_px % grid_px or image_px < 4 * grid_px or image_px < 32:
        raise UserError(
            f"image_px={image_px} must be at least 32, and a multiple of grid_px={grid_px}, four times or more"
        )
    return [side for side in range(grid_px, image_px // 2 + 1, grid_px) if side >= image_px // 4]


def _draw_named_objects(
    rng: np.random.Generator, names: Sequence[str], sides: Sequence[int], *, count: int, image_px: int, grid_px: int
) -> list[drawing.SceneObject] | None:
    """Place objects of different names, photos as rectangles and shapes as squares; None if they do not fit."""
    chosen = drawing.shuffle(rng, names)[:count]
    # Photos may be stretched, shapes may not: a stretched square is not a square.
    widths = drawing.choose_with_replacement(rng, sides, count)
    heights = widths if names is SHAPE_NAMES else drawing.choose_with_replacement(rng, sides, count)
    boxes = drawing.place_boxes(rng, list(zip(widths, heights, strict=True)), image_px=image_px, step=grid_px, gap=0)
    if boxes is None:
        return None
    return list(map(drawing.SceneObject, chosen, boxes))


def _paste_photo(canvas: Image.Image, photo: Image.Image, box: drawing.Box, rng: np.random.Generator) -> None:
    """Paste a crop of a photo with a thin white margin; both together fill the box."""
    x1, y1, x2, y2 = box
    crop = photos.random_crop(rng, photo, x2 - x1, y2 - y1)
    margin = max(1, canvas.width // 64)
    canvas.paste(drawing.COLOURS["white"], box)
    inner = (x1 + margin, y1 + margin, x2 - margin, y2 - margin)
    canvas.paste(crop.resize((inner[2] - inner[0], inner[3] - inner[1])), inner)


def _box_target(box: drawing.Box) -> Target:
    return Target(answer_type=AnswerType.BOX, value=list(box), coordinate_system=CoordinateSystem.PX_ORIGINAL)


def _pad_box(rng: np.random.Generator, box: drawing.Box, pad_px: int, image_px: int) -> drawing.Box:
    """Move each side outwards by `pad_px` with probability 3/4, at most to the edge of the image."""
    # Four numbers are drawn whatever `pad_px` is, so that the option changes no other label.
    left, top, right, bottom = (pad_px * int(moves) for moves in rng.random(4) < 0.75)
    x1, y1, x2, y2 = box
    return max(x1 - left, 0), max(y1 - top, 0), min(x2 + right, image_px), min(y2 + bottom, image_px)
